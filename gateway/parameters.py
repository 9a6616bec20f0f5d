"""What a request may ask of the embedded engine: every field checked, every field that cannot be honoured named.

Upstream servers get their fields unchecked: what a provider understands is the provider's business.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from ..backend_engine.params import BIAS, MOST_TOP_LOGPROBS, PENALTY, REPETITION, SamplingDefaults, SamplingParams
from .bodies import bad_request
from .formats import Formats
from .tools.offer import Offer, ToolChoice, offer_of

MAX_STOPS = 4
MAX_STOP_IDS = 256
MAX_CHOICES = 128
_NO_CAP = 1 << 31
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

# Fields that do not change what an answer may look like: identity, bookkeeping, hints.
HARMLESS = frozenset(
    {
        "model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "api_base", "base_url", "api_key",
    }
)  # fmt: skip
_HARMLESS_IN_CHATS = HARMLESS | {
    "messages", "prediction", "reasoning_effort", "verbosity",
}  # fmt: skip


class Sampling(Formats):
    """How the tokens of an answer are chosen and which text they may make, for chats and raw prompts alike."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-PENALTY, le=PENALTY)
    presence_penalty: float = Field(0.0, ge=-PENALTY, le=PENALTY)
    repetition_penalty: float | None = Field(None, ge=REPETITION[0], le=REPETITION[1])
    logit_bias: dict[str, Annotated[float, Field(ge=-BIAS, le=BIAS)]] = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field((), max_length=MAX_STOP_IDS)
    ignore_eos: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ("",)
        if len(stops) > MAX_STOPS or "" in stops:
            raise ValueError(f"must be a string or up to {MAX_STOPS} strings, none of them empty")
        return stops

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("logit_bias")
    @classmethod
    def _by_id(cls, value: dict[str, float]) -> dict[str, float]:
        if not all(map(_TOKEN_ID.fullmatch, value)):
            raise ValueError('its keys must be token ids as strings, such as "50256"')
        return value

    @property
    def told(self) -> int | None:
        """How many of the likeliest tokens are told with each token; None where nothing is told."""
        return None

    @property
    def cap(self) -> int | None:
        """How many tokens an answer may have, if the request says so."""
        return self.max_tokens

    def sampling(self, defaults: SamplingDefaults | None = None) -> SamplingParams:
        """As the engine takes it; `defaults` hold where the request names nothing.

        `max_tokens` is a cap: however large, it is no error.
        """
        defaults = defaults or SamplingDefaults()
        return SamplingParams(
            temperature=float(_first(self.temperature, defaults.temperature)),
            top_p=float(_first(self.top_p, defaults.top_p)),
            top_k=max(_first(self.top_k, defaults.top_k), 0),
            min_p=float(_first(self.min_p, defaults.min_p)),
            frequency_penalty=float(self.frequency_penalty),
            presence_penalty=float(self.presence_penalty),
            repetition_penalty=float(_first(self.repetition_penalty, defaults.repetition_penalty)),
            logit_bias=tuple((int(token), float(value)) for token, value in self.logit_bias.items()),
            seed=self.seed,
            max_tokens=None if self.cap is None else min(self.cap, _NO_CAP),
            min_tokens=min(self.min_tokens, _NO_CAP),
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.told,
        )


class ChatParameters(Sampling):
    """The sampling side of a chat completion, and what its text may be.

    Fields beyond these are refused by name unless they are harmless.
    """

    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[Any] = Field(default_factory=list[Any])
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] = Field(default_factory=list)

    @field_validator("top_logprobs")
    @classmethod
    def _of_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("logprobs") is False:
            raise ValueError("needs logprobs to be true")
        return value

    @property
    def told(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def offer(self) -> Offer | None:
        """Which functions may be called; None where none may. BadRequest where that makes no sense."""
        return offer_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def cap(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


T = TypeVar("T")


def _first(given: T | None, default: T) -> T:
    return default if given is None else given


_UNSUPPORTED = {
    "tool_choice": "tool_choice must be none, auto, required, a function, or allowed_tools of functions",
    "modalities": "the embedded engine writes text only",
}


def chat_parameters(body: Mapping[str, Any]) -> ChatParameters:
    """Check a request body; BadRequest names the first field at fault. A field that is null counts as absent."""
    asked = {name: value for name, value in body.items() if value is not None and name not in _HARMLESS_IN_CHATS}
    try:
        return ChatParameters.model_validate(asked)
    except ValidationError as error:
        raise bad_request(error, said=_UNSUPPORTED) from None
