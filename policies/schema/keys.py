"""API keys and limits, within the section `server`: who may do what, how much of it, and where that is counted."""

from datetime import UTC, datetime
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from ..fields import EnvironmentName, Expiry, Items, RedisURL, Seconds, Sha256, Text
from .base import Spec

Scope = Literal["inference", "embeddings", "collections:read", "collections:write", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
ORDINARY_SCOPES: tuple[Scope, ...] = SCOPES[:4]
"""What a key may do that names no scopes: all but to watch the gateway, or what others ask of it."""
Count = Annotated[int, Field(ge=1)]


class LimitsSpec(Spec):
    """What one key may do at most. None is no limit.

    Minutes are sliding: what is used comes back evenly. Days are those of UTC and begin at 0:00. Tokens are those of
    prompts and answers together. `concurrent`: requests that are being served, streams until they end.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    requests_per_day: Count | None = None
    tokens_per_day: Count | None = None
    concurrent: Count | None = None


class CountersSpec(Spec):
    """Where limits are counted for several gateways: a Redis or Valkey server, whose password `password_env` holds.

    Connecting, and each silence, may take `timeout` seconds. While the server cannot be asked, `fail: open` lets each
    gateway count by itself, and `fail: closed` refuses requests that have limits.
    """

    url: RedisURL
    password_env: EnvironmentName | None = None
    timeout: Seconds = 1.0
    fail: Literal["open", "closed"] = "open"


class ApiKeySpec(Spec):
    """A key that clients may use, by its digest or by the environment variable that holds it.

    `scopes`: the routes that it opens. `models` and `collections` are globs, `policies` names; None is all of them.
    Where nobody chooses a policy and the default is not among `policies`, the first of them is used.
    `expires`: a day, which is its last one in UTC, or a moment with its zone.
    `limits` take the place of `server.limits` one by one; null is no limit.
    """

    name: Text
    sha256: Sha256 | None = None
    env: EnvironmentName | None = None
    scopes: Annotated[Items[Scope], Field(min_length=1)] = ORDINARY_SCOPES
    models: Annotated[Items[Text], Field(min_length=1)] | None = None
    policies: Annotated[Items[Text], Field(min_length=1)] | None = None
    collections: Items[Text] | None = None
    expires: Expiry | None = None
    limits: LimitsSpec = LimitsSpec()

    @model_validator(mode="after")
    def _one_source(self) -> "ApiKeySpec":
        if (self.sha256 is None) == (self.env is None):
            raise ValueError("give exactly one of sha256 and env")
        return self

    def expired(self, now: datetime | None = None) -> bool:
        """Whether it may not be used any more."""
        return self.expires is not None and (now or datetime.now(UTC)) >= self.expires

    def limits_over(self, defaults: LimitsSpec) -> LimitsSpec:
        """Its limits; what it does not name is as in `defaults`."""
        own = {name: getattr(self.limits, name) for name in self.limits.model_fields_set}
        return defaults.model_copy(update=own)
