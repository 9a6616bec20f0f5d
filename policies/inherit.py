"""Policies that extend each other and the presets: fields of the child win, mappings merge, lists are replaced."""

from collections.abc import Mapping
from typing import Any

from .presets import PRESETS

MAX_LINEAGE = 32


def parent_of(name: str, policies: Mapping[str, Any]) -> str | None:
    """What the policy says it extends; None when it extends nothing or the field is no text."""
    raw = policies.get(name)
    parent = raw.get("extends") if isinstance(raw, Mapping) else None
    return parent if isinstance(parent, str) else None


def lineage(name: str, policies: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """The file's policies from `name` up, and the preset or unknown name at the top (None: nothing extended there).

    A policy that extends its own name means the preset of that name. A cycle ends the list with a name that is in it
    already; a list longer than MAX_LINEAGE is broken off.
    """
    chain = [name]
    while len(chain) <= MAX_LINEAGE:
        parent = parent_of(chain[-1], policies)
        if parent is None or parent not in policies or (parent == chain[-1] and parent in PRESETS):
            return chain, parent
        chain.append(parent)
        if parent in chain[:-1]:
            return chain, None
    return chain, None


def merged(name: str, policies: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's fields with all that it inherits, without `extends`. Its lineage must be known and free of cycles."""
    chain, top = lineage(name, policies)
    assert len(set(chain)) == len(chain), f"cycle: {chain}"
    fields: dict[str, Any] = dict(PRESETS[top]) if top is not None else {}
    for ancestor in reversed(chain):
        own = {key: value for key, value in policies[ancestor].items() if key != "extends"}
        fields = {**fields, **{key: _merge(fields.get(key), value) for key, value in own.items()}}
    fields.setdefault("description", "")
    return fields


def _merge(inherited: Any, own: Any) -> Any:
    if isinstance(inherited, Mapping) and isinstance(own, Mapping):
        return {**inherited, **{key: _merge(inherited.get(key), value) for key, value in own.items()}}
    return own
