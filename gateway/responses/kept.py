"""Responses that are kept for the next turn and for GET, in memory and with a bound. Used on one event loop."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...policies.schema import ResponsesSpec
from ...prompt import NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """`response` as GET gives it; `messages`: what its turn adds to the conversation, a JSON list of chat messages.

    `previous` is the response that it followed.
    """

    response: bytes
    messages: bytes
    previous: str | None

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Keeps what each tenant asked to be kept: the last used of it, within the bounds of `limits`.

    A conversation is used as a whole, so that its beginning is never forgotten before its end.
    """

    def __init__(self, limits: ResponsesSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[Kept, float]] = OrderedDict()  # by last use
        self._ids: dict[str, OrderedDict[str, None]] = {}
        self._bytes: dict[str, int] = {}
        self._total = 0

    def put(self, tenant: str, response_id: str, kept: Kept) -> None:
        """Keep a response; what was used longest ago makes room. One that is too large by itself is not kept."""
        if kept.size > min(self._limits.bytes, self._limits.total):
            return
        self._kept[tenant, response_id] = (kept, self._clock())
        self._ids.setdefault(tenant, OrderedDict())[response_id] = None
        self._bytes[tenant] = self._bytes.get(tenant, 0) + kept.size
        self._total += kept.size
        ids = self._ids[tenant]
        while ids and (len(ids) > self._limits.count or self._bytes[tenant] > self._limits.bytes):
            self._drop(tenant, next(iter(ids)))
        self._expire()
        while self._total > self._limits.total:
            self._drop(*next(iter(self._kept)))

    def get(self, tenant: str, response_id: str) -> Kept:
        """NotFound for one that was never kept, is somebody else's, or has been dropped."""
        self._expire()
        found = self._kept.get((tenant, response_id))
        if found is None:
            raise NotFound(f"response {response_id[:80]!r} is not kept here (any more)", code="response_not_found")
        return found[0]

    def conversation(self, tenant: str, response_id: str) -> list[bytes]:
        """The messages of all turns up to this response's, oldest first. NotFound names the first turn that is gone."""
        chain: list[tuple[str, Kept]] = []
        at: str | None = response_id
        while at is not None:
            try:
                kept = self.get(tenant, at)
            except NotFound as error:
                message = error.message if at == response_id else f"{error.message}, but {response_id!r} follows it"
                raise NotFound(
                    f"{message}; send the whole conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                ) from None
            chain.append((at, kept))
            at = kept.previous
        now = self._clock()
        for one, kept in reversed(chain):
            self._kept[tenant, one] = (kept, now)
            self._kept.move_to_end((tenant, one))
            self._ids[tenant].move_to_end(one)
        return [kept.messages for _, kept in reversed(chain)]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response; NotFound as `get`. Conversations that went through it cannot be continued."""
        self.get(tenant, response_id)
        self._drop(tenant, response_id)

    def _expire(self) -> None:
        before = self._clock() - self._limits.age
        while self._kept and next(iter(self._kept.values()))[1] < before:
            self._drop(*next(iter(self._kept)))

    def _drop(self, tenant: str, response_id: str) -> None:
        kept, _ = self._kept.pop((tenant, response_id))
        del self._ids[tenant][response_id]
        self._bytes[tenant] -= kept.size
        self._total -= kept.size
        if not self._ids[tenant]:
            del self._ids[tenant], self._bytes[tenant]
