"""Field types of the policy file, with their checks. Messages repeat no value, for it may be a secret."""

import re
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from ..prompt import Kind

T = TypeVar("T")
Items = Annotated[tuple[T, ...], Strict(False)]
KindName = Annotated[Kind, Strict(False)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Share = Annotated[float, Field(gt=0, le=1)]
Percent = Annotated[float, Field(ge=0, le=100)]


def _slug(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise ValueError("must be up to 64 ASCII letters, digits, '-', '_' and '.'")
    return value


def _environment_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        # The value is not repeated: people paste the key itself here.
        raise ValueError("must be the name of an environment variable (letters, digits, _), not the secret itself")
    return value


def _sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise ValueError("must be a SHA-256 digest in 64 hex digits: printf %s KEY | sha256sum")
    return value.lower()


def _base_url(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", value):
        raise ValueError("must be an http(s) URL without user, password, query or fragment: https://host:port/v1")
    import httpx  # as the gateway reads it; a file without upstreams needs none of it

    try:
        host = httpx.URL(value).raw_host.decode("ascii")
    except httpx.InvalidURL:
        raise ValueError("must be an http(s) URL with a host that can be asked for: https://host:port/v1") from None
    if not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        raise ValueError("must be an http(s) URL whose host has 1 to 63 characters between dots")
    return value.rstrip("/")


def _redis_url(value: str) -> str:
    if not re.fullmatch(r"rediss?://[^\s/?#@]+(/\d+)?", value):
        raise ValueError("must be redis:// or rediss://host:port/number without user or password (see password_env)")
    return value


def _expiry(value: Any) -> Any:
    """A day ends when the next one begins."""
    if not isinstance(value, str):
        return value
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
            day = date.fromisoformat(value) + timedelta(days=1)
            return datetime(day.year, day.month, day.day, tzinfo=UTC)
        moment = datetime.fromisoformat(value)
    except (ValueError, OverflowError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError("must be a day (2027-01-31) or a moment with its zone (2027-01-31T12:00:00Z)")
    return moment.astimezone(UTC)


def _version(value: Any) -> Any:
    # True and 1.0 equal 1 in Python, but a file that says so means something else.
    return value if type(value) is int else None


def _option(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else (value,)
    if not all(item is None or isinstance(item, bool | int | float | str) for item in items):
        raise ValueError("must be a number, a text, true, false, null or a flat list of these")
    return tuple(value) if isinstance(value, list) else value


def _policy_names(value: Any) -> Any:
    named = {"all": ("*",), "none": ()}
    if isinstance(value, str):
        if value not in named:
            raise ValueError("must be all, none or a list of policy names")
        return named[value]
    return value


Option = Annotated[Any, AfterValidator(_option)]
PolicyNames = Annotated[Items[Text], BeforeValidator(_policy_names)]
EnvironmentName = Annotated[str, AfterValidator(_environment_name)]
Slug = Annotated[str, AfterValidator(_slug)]
"""Travels in headers and metrics."""
Sha256 = Annotated[str, AfterValidator(_sha256)]
RedisURL = Annotated[str, AfterValidator(_redis_url)]
BaseURL = Annotated[str, AfterValidator(_base_url)]
Expiry = Annotated[datetime, BeforeValidator(_expiry)]
Version = BeforeValidator(_version)
