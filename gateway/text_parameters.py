"""What a legacy text completion may ask of the embedded engine. Upstream servers get their fields unchecked."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from pydantic import Field, ValidationError, field_validator

from ..prompt import BadRequest
from .bodies import bad_request
from .parameters import HARMLESS, Sampling

MOST_LOGPROBS = 5
_MAX_TOKENS = 16

RawPrompt = str | tuple[int, ...]
"""A text, or token ids."""


class TextParameters(Sampling):
    """A completion's prompts and the sampling side of it; what is asked is asked for each prompt.

    Fields beyond these are refused by name unless they are harmless. `add_special_tokens`, as vLLM has it: whether the
    tokenizer puts a begin token before texts where the model wants one.
    """

    prompt: tuple[Any, ...]
    max_tokens: int | None = Field(_MAX_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> tuple[RawPrompt, ...]:
        several = value if isinstance(value, list) and value and not _are_ids(value) else [value]
        for one in several:
            if not (isinstance(one, str) or _are_ids(one)) or not one:
                raise ValueError("must be a text or a list of token ids, or a list of these, none of them empty")
        return tuple(one if isinstance(one, str) else tuple(one) for one in several)

    @property
    def prompts(self) -> tuple[RawPrompt, ...]:
        return self.prompt

    @property
    def choices(self) -> int:
        """Over all prompts."""
        return len(self.prompt) * self.n

    @property
    def told(self) -> int | None:
        return self.logprobs


def text_parameters(body: Mapping[str, Any]) -> TextParameters:
    """Check a request body; BadRequest names the first field at fault. A field that is null counts as absent."""
    asked = {name: value for name, value in body.items() if value is not None and name not in HARMLESS}
    if asked.get("suffix") == "":
        del asked["suffix"]  # some clients always send it, and an empty one asks for nothing
    try:
        parameters = TextParameters.model_validate(asked)
    except ValidationError as error:
        raise bad_request(error) from None
    if parameters.best_of not in (None, parameters.n):
        message = f"best_of must be absent or {parameters.n}, as n is: answers are not ranked here"
        raise BadRequest(message, param="best_of", code="unsupported_value")
    return parameters


def _are_ids(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
