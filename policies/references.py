"""Names in a policy file that must exist elsewhere in it: policies, backends, API keys; and cycles of `extends`.

Works on the raw data, so that these problems are found together with those of form.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .complaints import dotted, nearest
from .inherit import MAX_LINEAGE, lineage, parent_of
from .presets import PRESETS
from .schema import DEFAULT_BACKEND
from .yamltree import Path

Complaint = tuple[Path, str]


def check_references(data: Mapping[str, Any]) -> Iterator[Complaint]:
    """(path, message) for each name that leads nowhere."""
    policies = _mapping(data, "policies")
    names = [*policies, *(preset for preset in PRESETS if preset not in policies)]
    backends = list(_mapping(data, "backends")) if "backends" in data else [DEFAULT_BACKEND]
    keys = [key.get("name") for key in _sequence(_mapping(data, "server"), "api_keys") if isinstance(key, Mapping)]
    yield from _known(data.get("default_policy"), ("default_policy",), "policy", names)
    yield from _policy_names(policies)
    yield from _extends(policies, names)
    yield from _allowed(policies, names)
    yield from _keys(_sequence(_mapping(data, "server"), "api_keys"), names)
    yield from _fallbacks(_mapping(data, "backends"), backends)
    for i, route in enumerate(_sequence(data, "routes")):
        if isinstance(route, Mapping):
            yield from _known(route.get("policy"), ("routes", i, "policy"), "policy", names)
            yield from _known(route.get("shadow"), ("routes", i, "shadow"), "policy", names)
            rolled = _mapping(route, "rollout").get("policy")
            yield from _known(rolled, ("routes", i, "rollout", "policy"), "policy", names)
            yield from _known(route.get("backend"), ("routes", i, "backend"), "backend", backends)
            key = _mapping(route, "match").get("api_key")
            yield from _known(
                key, ("routes", i, "match", "api_key"), "API key", [k for k in keys if isinstance(k, str)]
            )


def _fallbacks(specs: Mapping[str, Any], backends: list[str]) -> Iterator[Complaint]:
    for name, spec in specs.items():
        for i, fallback in enumerate(_sequence(spec, "fallbacks")):
            other = fallback.get("backend") if isinstance(fallback, Mapping) else None
            path: Path = ("backends", name, "fallbacks", i, "backend")
            yield from _known(other, path, "backend", backends)
            if other == name:
                yield path, f"backend {name!r} cannot be its own fallback"


def _policy_names(policies: Mapping[str, Any]) -> Iterator[Complaint]:
    for name in policies:
        # A name travels in a header and behind the last colon of a model.
        if not name or not name.isascii() or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            yield ("policies", name), f"policy name {name[:60]!a} must be ASCII letters, digits, '-', '_' and '.'"


def _extends(policies: Mapping[str, Any], names: list[str]) -> Iterator[Complaint]:
    for name in policies:
        path: Path = ("policies", name, "extends")
        parent = parent_of(name, policies)
        yield from _known(parent, path, "policy", names)
        chain, _ = lineage(name, policies)
        if len(chain) > MAX_LINEAGE:
            yield path, f"policies extend each other more than {MAX_LINEAGE} times over"
        elif chain[-1] == name and len(chain) > 1:
            yield path, f"policies extend each other in a circle: {' -> '.join(chain)}"


def _allowed(policies: Mapping[str, Any], names: list[str]) -> Iterator[Complaint]:
    for name, policy in policies.items():
        for i, allowed in enumerate(_sequence(policy, "allow_client_policy")):
            yield from _known(allowed, ("policies", name, "allow_client_policy", i), "policy", names)


def _keys(keys: tuple[Any, ...], policies: list[str]) -> Iterator[Complaint]:
    """Names and digests stand once; the policies of a key exist."""
    names: set[str] = set()
    digests: set[str] = set()
    for i, key in enumerate(keys):
        path: Path = ("server", "api_keys", i)
        name, digest = (key.get(field) if isinstance(key, Mapping) else None for field in ("name", "sha256"))
        if isinstance(name, str):
            if name in names:
                yield (*path, "name"), f"API key name {name[:60]!r} is given twice"
            names.add(name)
        if isinstance(digest, str):
            if digest.lower() in digests:
                yield (*path, "sha256"), f"the key of {str(name)[:60]!r} is given twice"
            digests.add(digest.lower())
        for j, policy in enumerate(_sequence(key, "policies")):
            yield from _known(policy, (*path, "policies", j), "policy", policies)


def _known(name: Any, path: Path, what: str, names: list[str]) -> Iterator[Complaint]:
    if not isinstance(name, str) or name in names:
        return
    close = nearest(name, names)
    hint = f"the nearest is {close!r} (of {', '.join(names)})" if close else f"the file defines no {what}"
    yield path, f"{dotted(path)}: unknown {what} {name[:60]!r}; {hint}"


def _mapping(data: Any, key: str) -> Mapping[str, Any]:
    value = data.get(key) if isinstance(data, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _sequence(data: Any, key: str) -> tuple[Any, ...]:
    value = data.get(key) if isinstance(data, Mapping) else None
    return value if isinstance(value, tuple) else ()
