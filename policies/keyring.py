"""The API keys of a policy file: who a key belongs to, and what its owner may do."""

import hmac
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from ..prompt import Forbidden, Unauthorized
from .match import digest
from .schema import ApiKeySpec, Scope


class Keyring:
    """Finds a key's entry by its digest. Variables are read at each look: a file may be checked without them."""

    def __init__(self, keys: Iterable[ApiKeySpec]) -> None:
        self._keys = tuple(keys)
        self._by_digest = {key.sha256: key for key in self._keys if key.sha256 is not None}
        self._named = [(key, key.env) for key in self._keys if key.env is not None]

    def find(self, api_key: str | None) -> ApiKeySpec | None:
        """The entry of this key, expired or not.

        What is compared are SHA-256 digests, in constant time. The table before that tells by its timing nothing that
        helps to find a key: nobody can choose the digest of a guess.
        """
        if not api_key:
            return None
        hashed = digest(api_key)
        found = self._by_digest.get(hashed)
        if found is not None and not hmac.compare_digest(hashed, found.sha256 or ""):
            found = None
        for entry, variable in self._named:
            secret = os.environ.get(variable)
            if secret and hmac.compare_digest(digest(secret), hashed):
                found = found or entry
        return found

    def authenticated(self, api_key: str | None, *, now: datetime | None = None) -> ApiKeySpec | None:
        """The entry of this key; None where there are no keys and everybody is let in. Unauthorized otherwise."""
        if not self._keys:
            return None
        entry = self.find(api_key)
        if entry is None:
            known = "this API key is not known" if api_key else "an API key is needed: Authorization: Bearer"
            raise Unauthorized(known)
        if entry.expired(now):
            assert entry.expires is not None, entry.name
            when = entry.expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
            raise Unauthorized(f"the API key {entry.name!r} expired on {when}", code="expired_api_key")
        return entry

    def digests(self) -> tuple[str, ...]:
        """The SHA-256 digests, in hex, of all keys that are known."""
        secrets = [(key, os.environ.get(key.env) if key.env else None) for key in self._keys]
        found = [digest(secret) if secret else key.sha256 for key, secret in secrets]
        return tuple(one for one in found if one is not None)


def require_scope(key: ApiKeySpec | None, scope: Scope, *, what: str) -> None:
    """Forbidden where the key does not open `what` (as "POST /v1/embeddings")."""
    if key is not None and scope not in key.scopes:
        message = f"{what} needs the scope {scope!r}, which the API key {key.name!r} lacks"
        raise Forbidden(f"{message}; it has {', '.join(key.scopes)}", code="scope_not_allowed")


def may_use_model(key: ApiKeySpec | None, model: str) -> bool:
    return key is None or key.models is None or _fits(model, key.models)


def require_model(key: ApiKeySpec | None, model: str) -> None:
    """Forbidden where the key may not use the model."""
    if key is not None and not may_use_model(key, model):
        message = f"the API key {key.name!r} may not use the model {model[:80]!r}"
        raise Forbidden(f"{message}; allowed: {', '.join(key.models or ())}", param="model", code="model_not_allowed")


def require_policy(key: ApiKeySpec | None, name: str, *, why: str = "") -> None:
    """Forbidden where the key may not use the policy; `why` ends the message: why it is this one."""
    if key is not None and key.policies is not None and name not in key.policies:
        message = f"the API key {key.name!r} may not use the policy {name!r}"
        allowed = f"; allowed: {', '.join(key.policies)}"
        raise Forbidden(f"{message}{allowed}{why}", param="policy", code="policy_not_allowed")


def may_use_collection(key: ApiKeySpec | None, name: str) -> bool:
    return key is None or key.collections is None or _fits(name, key.collections)


def require_collection(key: ApiKeySpec | None, name: str, *, by: str = "") -> None:
    """Forbidden where the key may not use the collection; `by` says whose wish it was."""
    if key is not None and not may_use_collection(key, name):
        allowed = ", ".join(key.collections or ()) or "none"
        message = f"the API key {key.name!r} may not use the collection {name[:80]!r}{by}; allowed: {allowed}"
        raise Forbidden(message, param="collection", code="collection_not_allowed")


def _fits(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in globs)
