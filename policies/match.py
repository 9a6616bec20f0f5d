"""Which policy and which backend a request gets: pure functions over names, globs and sizes."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..prompt import Forbidden, UnknownPolicy
from .rollout import Group, drawn, name_of
from .schema import Backend, MatchSpec, Policy, RolloutSpec

POLICY_HEADER = "x-promptsluice-policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Where a request goes and what may be done to it.

    `model` has no policy suffix any more. `reason` says, for a person, why this policy. `route` is the index of the
    matched route in the file, `key_name` the name of the API key where the file names it. `rollout` and `group`: of
    which staged rollout the request is part, and how. `shadow` names another policy that is tried beside it.
    `fail_closed`: the request is refused where the policy cannot be carried out.
    """

    model: str
    backend: str
    policy: Policy
    policy_name: str
    reason: str
    route: int | None = None
    key_name: str | None = None
    rollout: str = ""
    group: Group | None = None
    shadow: str | None = None
    fail_closed: bool = False

    def to_wire(self) -> dict[str, Any]:
        """As JSON, with the policy by its name; routes are counted from 1, as for a person."""
        return {
            "model": self.model,
            "backend": self.backend,
            "policy": self.policy_name,
            "reason": self.reason,
            "route": None if self.route is None else self.route + 1,
            "rollout": self.rollout or None,
            "group": self.group,
            "shadow": self.shadow,
            "on_failure": "closed" if self.fail_closed else "open",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A policy's name, why it was chosen, and the draw where there was one."""

    name: str
    reason: str
    rollout: str = ""
    group: Group | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What routes can see of a request. Header names in lower case; `prompt_tokens` and `conversation`, which tells
    conversations apart, are called only when needed. Without the latter the request is part of no rollout.
    """

    model: str
    headers: Mapping[str, str]
    key_name: str | None
    key_sha256: str | None
    prompt_tokens: Callable[[], int]
    conversation: Callable[[], bytes] | None = None


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


def chosen_by_client(
    asked: str, how: str, *, own: Chosen, policies: Mapping[str, Policy], also: Sequence[str] = ()
) -> Chosen:
    """What a client asks for, where the policy that the file chooses lets it, or its key does (`also`); such a request
    is part of no rollout.

    Forbidden else, and UnknownPolicy for a name that there is not. Names are listed only to who may choose among them.
    """
    allowed = policies[own.name].allow_client_policy
    if allowed != ("*",):
        allowed = (*allowed, *also)
    if asked != own.name and allowed != ("*",) and asked not in allowed:
        may = ", ".join(dict.fromkeys((own.name, *allowed)))
        message = f"policy {asked[:80]!r} may not be chosen here; allowed: {may}"
        raise Forbidden(f"{message} (see allow_client_policy in the policy file)", code="policy_not_allowed")
    if asked not in policies:
        raise UnknownPolicy(f"unknown policy {asked[:80]!r}; known: {', '.join(policies)}", param="policy")
    return Chosen(name=asked, reason=how)


def drawn_into(spec: RolloutSpec, facts: Facts, *, own: Chosen) -> Chosen:
    """What the file chooses, or the policy that is rolled out, where the draw falls on this conversation or key."""
    if facts.conversation is None:
        return own
    group = drawn(spec, key_sha256=facts.key_sha256, conversation=facts.conversation())
    name = spec.policy if group is Group.ROLLOUT else own.name
    reason = f"{own.reason}, group {group} of rollout {name_of(spec)}"
    return Chosen(name=name, reason=reason, rollout=name_of(spec), group=group)


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
