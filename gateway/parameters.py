"""What a chat request may ask of the embedded engine: every field checked, every field that cannot be honoured named.

Upstream servers get their fields unchecked: what a provider understands is the provider's business.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from ..backend_engine.types import SamplingParams
from .bodies import bad_request
from .formats import Formats

MAX_STOPS = 4
_NO_CAP = 1 << 31

# Fields that do not change what an answer may look like: identity, bookkeeping, hints.
_HARMLESS = frozenset(
    {
        "messages", "model", "stream", "stream_options", "tools", "parallel_tool_calls",
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "reasoning_effort", "verbosity", "api_base", "base_url", "api_key",
    }
)  # fmt: skip


class ChatParameters(Formats):
    """The sampling side of a chat completion, and what its text may be.

    Fields beyond these are refused by name unless they are harmless.
    """

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    presence_penalty: float = Field(0.0, ge=0, le=0)
    logit_bias: dict[str, float] = Field(default_factory=dict, max_length=0)
    tool_choice: Literal["none", "auto"] = "auto"
    modalities: list[Literal["text"]] = Field(default_factory=list)

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ("",)
        if len(stops) > MAX_STOPS or "" in stops:
            raise ValueError(f"must be a string or up to {MAX_STOPS} strings, none of them empty")
        return stops

    def sampling(self) -> SamplingParams:
        """As the engine takes it. `max_tokens` is a cap: however large, it is no error."""
        cap = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return SamplingParams(
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=max(self.top_k, 0),
            min_p=float(self.min_p),
            seed=self.seed,
            max_tokens=None if cap is None else min(cap, _NO_CAP),
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


_UNSUPPORTED = {
    "n": "the embedded engine gives one choice; n must be 1",
    "logprobs": "the embedded engine does not return logprobs",
    "top_logprobs": "the embedded engine does not return logprobs",
    "frequency_penalty": "the embedded engine has no penalties; frequency_penalty must be 0",
    "presence_penalty": "the embedded engine has no penalties; presence_penalty must be 0",
    "logit_bias": "the embedded engine does not support logit_bias",
    "tool_choice": "the embedded engine cannot force a tool call; tool_choice must be 'none' or 'auto'",
    "modalities": "the embedded engine writes text only",
}


def chat_parameters(body: Mapping[str, Any]) -> ChatParameters:
    """Check a request body; BadRequest names the first field at fault. A field that is null counts as absent."""
    asked = {name: value for name, value in body.items() if value is not None and name not in _HARMLESS}
    try:
        return ChatParameters.model_validate(asked)
    except ValidationError as error:
        raise bad_request(error, said=_UNSUPPORTED) from None
