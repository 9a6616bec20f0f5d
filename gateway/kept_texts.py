"""Texts that are kept for tenants by a key, in memory: summaries, and originals of what was rewritten."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable


class KeptTexts:
    """At most `limit` bytes for a tenant and `total` for all, each for `age` seconds after its last use; what was used
    longest ago goes first. Nobody sees another tenant's. Any thread. `clock` is in seconds.
    """

    def __init__(self, *, limit: int, total: int, age: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._total, self._age, self._clock = limit, total, age, clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()  # by last use
        self._of: dict[str, OrderedDict[str, None]] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0

    def get(self, tenant: str, key: str) -> str | None:
        """The text, or None where it never was, is another tenant's, or is gone."""
        with self._lock:
            self._expire()
            found = self._kept.get((tenant, key))
            if found is None:
                return None
            self._touch(tenant, key, found[0])
            return found[0]

    def put(self, tenant: str, key: str, text: str) -> bool:
        """Keep a text. False for one that is larger than all that may be kept."""
        size = _size(text)
        with self._lock:
            if size > min(self._limit, self._total):
                return False
            if (tenant, key) in self._kept:
                self._drop(tenant, key)
            self._touch(tenant, key, text)
            self._sizes[tenant] = self._sizes.get(tenant, 0) + size
            self._size += size
            while self._sizes[tenant] > self._limit:
                self._drop(tenant, next(iter(self._of[tenant])))
            while self._size > self._total:
                self._drop(*next(iter(self._kept)))
            self._expire()
            return True

    def _touch(self, tenant: str, key: str, text: str) -> None:
        self._kept[tenant, key] = (text, self._clock())
        self._kept.move_to_end((tenant, key))
        of = self._of.setdefault(tenant, OrderedDict())
        of[key] = None
        of.move_to_end(key)

    def _expire(self) -> None:
        before = self._clock() - self._age
        while self._kept and next(iter(self._kept.values()))[1] < before:
            self._drop(*next(iter(self._kept)))

    def _drop(self, tenant: str, key: str) -> None:
        text, _ = self._kept.pop((tenant, key))
        del self._of[tenant][key]
        self._sizes[tenant] -= _size(text)
        self._size -= _size(text)
        if not self._of[tenant]:
            del self._of[tenant], self._sizes[tenant]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass")) + 128  # and what keeping one costs
