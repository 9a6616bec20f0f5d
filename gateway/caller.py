"""Who asks: what the pipeline may know of a request besides its body."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..policies import ApiKeySpec
from .keys.ticket import Ticket

# Client headers that go upstream as they came; everything else, keys and cookies above all, stays here.
_FORWARDED = frozenset({"openai-beta", "traceparent", "tracestate"})
_IDEMPOTENCY = "idempotency-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`headers` have lower-case names, `path` is the route that was called. `api_key` never shows in a repr.

    `key` is its entry in the policy file, if that has any. `ticket` is the request's account, where it has one.
    """

    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)
    key: ApiKeySpec | None = None
    ticket: Ticket | None = field(default=None, repr=False, compare=False)
    path: str = ""

    @property
    def tenant(self) -> str:
        """Separates caches of different keys; "" for who has none."""
        return "" if not self.api_key else hashlib.sha256(self.api_key.encode("utf-8", "replace")).hexdigest()[:32]

    @property
    def forwarded(self) -> dict[str, str]:
        """The headers that may go upstream. All tenants share one key there, so that an idempotency key, which names a
        request of one of them, becomes a digest of the tenant and of the key: nobody gets another's answer.
        """
        headers = {name: value for name, value in self.headers.items() if name in _FORWARDED}
        given = self.headers.get(_IDEMPOTENCY)
        if given is not None:
            scoped = f"{self.tenant}/{given}".encode("utf-8", "replace")
            headers[_IDEMPOTENCY] = hashlib.sha256(scoped).hexdigest()
        return headers

    @property
    def wants_report(self) -> bool:
        """Whether the response may carry the field `promptsluice`."""
        return self.headers.get("x-promptsluice-report", "").strip().lower() in ("1", "true", "yes")


def caller_of(headers: Mapping[str, str], *, request_id: str, path: str = "") -> Caller:
    """The caller of an HTTP request; the key comes from `Authorization: Bearer` or, as some SDKs do it, `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = (token.strip() if scheme.lower() == "bearer" else "") or headers.get("x-api-key", "")
    return Caller(request_id=request_id, headers=headers, api_key=key or None, path=path)
