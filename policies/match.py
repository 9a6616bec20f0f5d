"""Which policy and which backend a request gets: pure functions over names, globs and sizes."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .schema import Backend, MatchSpec, Policy

POLICY_HEADER = "x-promptsluice-policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Where a request goes and what may be done to it.

    `model` has no policy suffix any more. `reason` says, for a person, why this policy. `route` is the index of the
    matched route in the file, `key_name` the name of the API key where the file names it.
    """

    model: str
    backend: str
    policy: Policy
    policy_name: str
    reason: str
    route: int | None = None
    key_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What routes can see of a request. Header names in lower case; `prompt_tokens` is called only when needed."""

    model: str
    headers: Mapping[str, str]
    key_name: str | None
    key_sha256: str | None
    prompt_tokens: Callable[[], int]


def digest(api_key: str) -> str:
    """SHA-256 of an API key in hex, as it stands in policy files."""
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()


def matches(match: MatchSpec, facts: Facts) -> bool:
    """Whether all conditions hold; the prompt is counted last, and only when everything else fits."""
    if match.model is not None and not fnmatchcase(facts.model, match.model):
        return False
    for name, pattern in match.header.items():
        if not fnmatchcase(facts.headers.get(name.lower(), "\0"), pattern):
            return False
    if match.api_key is not None and match.api_key != facts.key_name:
        return False
    if match.api_key_sha256 is not None and match.api_key_sha256 != facts.key_sha256:
        return False
    if match.prompt_tokens is None:
        return True
    tokens = facts.prompt_tokens()
    return match.prompt_tokens.min <= tokens and (match.prompt_tokens.max is None or tokens <= match.prompt_tokens.max)


def split_suffix(model: str, *, is_model: Callable[[str], bool], is_policy: Callable[[str], bool]) -> tuple[str, str]:
    """Cut `model:policy` into (model, policy); policy is "" where the colon belongs to the model's own name.

    A model that a backend lists by its full name is never cut (`llama3:8b`). Else the last colon begins a policy when
    such a policy exists, or when the part before it is a listed model: then the policy is simply unknown.
    """
    base, colon, suffix = model.rpartition(":")
    if not colon or not base or is_model(model):
        return model, ""
    return (base, suffix) if is_policy(suffix) or is_model(base) else (model, "")


def serving(model: str, backends: Mapping[str, Backend]) -> str | None:
    """The first backend that lists the model, else the first upstream without a list, else None."""
    for name, backend in backends.items():
        if model in backend.models:
            return name
    return next((name for name, backend in backends.items() if not backend.models), None)
