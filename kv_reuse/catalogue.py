"""What a store holds besides what this process put there: read from time to time, and told to the index by its salt.

A store's names are digests. Whose a chunk is shows only when its ids, under a salt, give its name; so nobody learns of
what others have, and ids that were damaged or changed fit nobody.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from .index import ChunkIndex
from .keys import KeySpace
from .store import ChunkStore


class Catalogue:
    """Holds the ids of stored chunks that no salt has claimed yet, at most `most_tokens` of them, newest last.

    Looks at the store at most once in `every_s` seconds, however many ask. For any thread.
    """

    def __init__(
        self,
        store: ChunkStore,
        index: ChunkIndex,
        *,
        every_s: float = 10.0,
        most_tokens: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._index = index
        self._every_s = every_s
        self._most = most_tokens
        self._clock = clock
        self._read_at = float("-inf")
        self._seen: set[str] = set()
        self._unclaimed: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._tokens = 0
        self._offered: dict[str, float] = {}  # salt: when the store had been read whose chunks it was offered
        self._lock = threading.Lock()

    def stale(self, salt: str) -> bool:
        """Whether `sync` would do anything."""
        return self._due() or self._offered.get(salt) != self._read_at

    def sync(self, space: KeySpace) -> None:
        """Add to the index what the store has under this salt. Blocks on the store."""
        with self._lock:
            if self._due():
                self._read()
            if self._offered.get(space.salt) == self._read_at:
                return
            self._offered[space.salt] = self._read_at
            own = [digest for digest, ids in self._unclaimed.items() if space.key(ids).digest == digest]
            for digest in own:
                ids = self._unclaimed.pop(digest)
                self._tokens -= len(ids)
                self._index.add(ids, salt=space.salt)

    def _due(self) -> bool:
        return self._clock() - self._read_at >= self._every_s

    def _read(self) -> None:
        self._read_at = self._clock()
        self._offered = {salt: at for salt, at in self._offered.items() if self._read_at - at < 60 * self._every_s}
        there: set[str] = set()
        for listed in self._store.catalogue():
            there.add(listed.digest)
            if listed.digest in self._seen or listed.digest in self._unclaimed:  # several tiers may have it
                continue
            ids = listed.read()
            if ids is not None:
                self._unclaimed[listed.digest] = ids
                self._tokens += len(ids)
        self._seen = there
        for digest in self._unclaimed.keys() - there:  # deleted, or evicted: nobody's any more
            self._tokens -= len(self._unclaimed.pop(digest))
        while self._tokens > self._most:
            self._tokens -= len(self._unclaimed.popitem(last=False)[1])
