"""The tier that several gateways share: chunks in a Redis or Valkey server, one hash a chunk with a field an anchor.

The server is a cache of its own: its `maxmemory` and `maxmemory-policy` bound what it holds, and what is not used for
`ttl_s` seconds goes. One that is slow or gone is a miss, and is left alone for a while.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..prompt.errors import ConfigError
from .chunkfile import DamagedChunk, decode, encode
from .keys import ChunkKey, ids_from_bytes, ids_to_bytes
from .store import ChunkStore, Listed, StoredChunk, TierStats
from .undelivered import Undelivered

log = logging.getLogger(__name__)

_PREFIX = "promptsluice:kv:"
_IDS = "ids"  # the field beside those of the anchors
_LISTED = 1000  # keys a step of a scan

T = TypeVar("T")


class Client(Protocol):
    """The commands of redis-py's client that are used, with answers as bytes. Whatever they raise is a failure."""

    def hget(self, name: str, key: str) -> Any: ...
    def hset(self, name: str, *, mapping: Any) -> Any: ...
    def hexists(self, name: str, key: str) -> Any: ...
    def hdel(self, name: str, *keys: str) -> Any: ...
    def hkeys(self, name: str) -> Any: ...
    def expire(self, name: str, time: int) -> Any: ...
    def delete(self, *names: str) -> Any: ...
    def scan_iter(self, match: str, count: int) -> Any: ...


class SharedStore(ChunkStore):
    """Chunks in a server that `client` talks to; `connect` makes one.

    After a failure the server is not asked for `pause_s` seconds, so that it costs one timeout in that time and not one
    a chunk. What comes from there is verified as a file is: whoever may write to the server can make misses, but hardly
    a wrong chunk.

    What is to be deleted is remembered until the server has done so, in files in the folder `undelivered` where there
    is one, and nothing else is asked of the server before that.
    """

    def __init__(
        self,
        client: Client,
        *,
        ttl_s: float = 7 * 86_400,
        pause_s: float = 10.0,
        undelivered: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._ttl_s = max(1, round(ttl_s))
        self._pause_s = pause_s
        self._undelivered = Undelivered(undelivered)
        self._clock = clock
        self._asleep_until = float("-inf")
        self._hits = self._misses = self._corrupt = self._refused = 0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> StoredChunk | None:
        data = self._asked(lambda: self._client.hget(_name(key.digest), _field(key)), None)
        chunk = None if data is None else self._decoded(data, key)
        with self._lock:
            self._hits += chunk is not None
            self._misses += chunk is None
        if chunk is not None:
            self._asked(lambda: self._client.expire(_name(key.digest), self._ttl_s), None)
        return chunk

    def put(self, key: ChunkKey, chunk: StoredChunk) -> bool:
        name = _name(key.digest)

        def stored() -> bool:
            if not self._client.hexists(name, _field(key)):  # same key, same content
                data = encode(key, chunk)
                self._client.hset(name, mapping={_field(key): data, _IDS: ids_to_bytes(chunk.ids)})
            self._client.expire(name, self._ttl_s)
            return True

        kept = self._asked(stored, False)
        with self._lock:
            self._refused += not kept
        return kept

    def contains(self, key: ChunkKey) -> bool:
        return bool(self._asked(lambda: self._client.hexists(_name(key.digest), _field(key)), False))

    def delete_all(self, digests: Collection[str]) -> Counter[str]:
        self._undelivered.add(digests)
        gone = self._reached(self._delivered, None)
        if gone is None:
            log.warning("the shared chunk store still has %d deleted chunks; it is told when it answers", len(digests))
            return Counter()
        return Counter({digest: gone[digest] for digest in digests})

    def catalogue(self) -> Iterator[Listed]:
        names = self._asked(lambda: list(self._client.scan_iter(match=f"{_PREFIX}*", count=_LISTED)), [])
        for name in names:
            digest = name.decode("ascii", "replace").removeprefix(_PREFIX)
            yield Listed(digest, lambda digest=digest: self._ids(digest))

    def stats(self) -> tuple[TierStats, ...]:
        """Of what this process asked; what the server holds it tells itself."""
        with self._lock:
            counters = {"hits": self._hits, "misses": self._misses, "corrupt": self._corrupt, "refused": self._refused}
        return (TierStats(tier="shared", **counters),)

    def flush(self) -> None:
        return  # `put` has sent it

    @property
    def _awake(self) -> bool:
        return self._clock() >= self._asleep_until

    def _asked(self, ask: Callable[[], T], otherwise: T) -> T:
        """The server's answer after all deletions; `otherwise` where there is none, or while it is left alone."""

        def answer() -> T:
            self._delivered()
            return ask()

        return self._reached(answer, otherwise)

    def _delivered(self) -> Counter[str]:
        """Have the server delete what it has not deleted yet; how many entries each chunk had."""
        gone = Counter[str]()

        def delete(digests: Collection[str]) -> None:
            for digest in digests:
                fields = {field.decode() for field in self._client.hkeys(_name(digest))}
                self._client.delete(_name(digest))
                gone[digest] += len(fields - {_IDS})

        self._undelivered.deliver(delete)
        return gone

    def _reached(self, ask: Callable[[], T], otherwise: T) -> T:
        if not self._awake:
            return otherwise
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - the client's, the network's and the server's own: all cost a miss
            self._asleep_until = self._clock() + self._pause_s
            log.warning("the shared chunk store is left alone for %g s: %s", self._pause_s, error)
            return otherwise

    def _decoded(self, data: bytes, key: ChunkKey) -> StoredChunk | None:
        try:
            return replace(decode(data, key=key), tier="shared")
        except DamagedChunk as error:
            log.warning("chunk %s of the shared store is damaged and was removed: %s", key.name, error)
            with self._lock:
                self._corrupt += 1
            self._asked(lambda: self._client.hdel(_name(key.digest), _field(key)), None)
            return None

    def _ids(self, digest: str) -> tuple[int, ...] | None:
        raw = self._asked(lambda: self._client.hget(_name(digest), _IDS), None)
        return None if raw is None or len(raw) % 4 else ids_from_bytes(raw)


def connect(url: str, *, password: str | None = None, timeout_s: float = 0.25) -> Client:
    """A client of the server at `url` (redis://host:port/number, rediss:// with TLS); connects when first used.

    Connecting, and each silence within an answer, take at most `timeout_s` seconds. Raises ConfigError where the
    package redis is not installed or the URL is none of its kind.
    """
    try:
        import redis
    except ImportError as error:
        raise ConfigError("kv_cache.shared needs the package redis; install promptsluice[shared]") from error
    try:
        return redis.Redis.from_url(
            url,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=None,
            decode_responses=False,
        )
    except ValueError as error:
        raise ConfigError(f"kv_cache.shared.url cannot be used: {error}") from error


def _name(digest: str) -> str:
    return f"{_PREFIX}{digest}"


def _field(key: ChunkKey) -> str:
    return key.anchor or "bare"
