"""Which scope a route needs. By method and path alone, so that it is known before a body is read."""

import re

from ...policies.schema import Scope

SPENDING = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        "/v1/compress",  # by models that are asked for summaries
    }
)
"""The routes on which tokens are spent."""
_COLLECTIONS = re.compile(r"/v1/collections(/.*)?", re.DOTALL)
_SEARCH = re.compile(r"/v1/collections/[^/]+/search")
_TOKENS = frozenset({"/tokenize", "/detokenize"})


def scope_of(method: str, path: str) -> Scope | None:
    """None for what needs no key, and for what knows better itself whom it lets in."""
    if _COLLECTIONS.fullmatch(path):
        reads = method in ("GET", "HEAD") or (method == "POST" and _SEARCH.fullmatch(path))
        return "collections:read" if reads else "collections:write"
    if path == "/v1/embeddings":
        return "embeddings"
    if path == "/metrics":
        return "metrics"
    return "inference" if path.startswith("/v1/") or path in _TOKENS else None
