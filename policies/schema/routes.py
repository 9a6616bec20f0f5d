"""The section `routes`: which requests get which policy and backend."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..fields import Percent, Sha256, Slug, Text
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


class RolloutSpec(Spec):
    """The share `percent` of a route's requests gets `policy` instead of the route's own; the share `holdout` never
    does, however far `percent` goes, so that there is something to compare with.

    `by`: whose requests stay together: those of a conversation (its messages up to the user's first), or of an API key,
    where there is one. `name` seeds the draw: rollouts of one name choose the same; None: the name of the policy.
    """

    policy: Text
    percent: Percent
    holdout: Percent = 0.0
    by: Literal["conversation", "key"] = "conversation"
    name: Slug | None = None


class RouteSpec(Spec):
    """What the requests that match get. The first matching route wins.

    `rollout` hands a share of them to another policy. `shadow` is a policy that is carried out beside the request and
    reported, but not sent. `on_failure`: where retrieving, counting or rewriting fails or is late, `open` sends the
    prompt without it, `closed` refuses the request.
    """

    match: MatchSpec = MatchSpec()
    policy: Text | None = None
    backend: Text | None = None
    rollout: RolloutSpec | None = None
    shadow: Text | None = None
    on_failure: Literal["open", "closed"] = "open"

    @model_validator(mode="after")
    def _does_something(self) -> "RouteSpec":
        if not self.model_fields_set - {"match"}:
            raise ValueError("a route needs a policy, a backend, a rollout, a shadow or on_failure")
        return self
