"""The section `routes`: which requests get which policy and backend."""

from typing import Annotated

from pydantic import Field, model_validator

from ..fields import Sha256, Text
from .base import Spec


class TokenRange(Spec):
    """Prompt size in tokens, both ends included."""

    min: Annotated[int, Field(ge=0)] = 0
    max: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "TokenRange":
        if self.max is not None and self.max < self.min:
            raise ValueError("min must not be greater than max")
        return self


class MatchSpec(Spec):
    """All given conditions must hold. `model` and header values are globs (*, ?, [abc]); header names ignore case."""

    model: Text | None = None
    header: dict[Text, Text] = Field(default_factory=dict)
    api_key: Text | None = None
    api_key_sha256: Sha256 | None = None
    prompt_tokens: TokenRange | None = None


class RouteSpec(Spec):
    """Requests that match get this policy, this backend, or both. The first matching route wins."""

    match: MatchSpec = MatchSpec()
    policy: Text | None = None
    backend: Text | None = None

    @model_validator(mode="after")
    def _does_something(self) -> "RouteSpec":
        if self.policy is None and self.backend is None:
            raise ValueError("a route needs a policy, a backend or both")
        return self
