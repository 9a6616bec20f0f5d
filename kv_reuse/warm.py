"""Computes the KV of chunks ahead of their use, several of them in one step of the engine, and stores it."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from ..backend_engine.rounded_kv import Block
from ..backend_engine.types import GenerationRequest, KVBlock, Result, Reuse, ReusedSpan, SamplingParams
from ..prompt.errors import ContextTooLong, Overloaded
from .anchors import Anchor
from .forgotten import Forgotten
from .keys import ChunkKey, Ids, KeySpace
from .rounding import ChunkDtype, kept
from .store import ChunkStore, StoredChunk

TOGETHER, TOKENS = 8, 2048  # chunks, and tokens of them, that are in the engine at a time
PLACES = 8192  # that they take there with their anchors, which would else drive prefixes out of the engine's memory
SHARE = 4  # of that memory they take one part in so many, or what one chunk takes
_ANCHORS = 4  # whose KV is held


class Prefiller(Protocol):
    """The part of the engine's service that computes chunks: blocks until all requests are finished."""

    def run_all(self, requests: Sequence[GenerationRequest]) -> list[Result]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReport:
    """Distinct chunks of one `warm`, by what became of them.

    `present` were stored, if nobody said after which anchor under another sink, or being computed by another thread;
    `skipped` are shorter than is worth keeping or longer, with their anchor, than the model's context or the engine's
    memory, or were forgotten meanwhile; `refused` were computed but the store did not keep them.
    """

    computed: int = 0
    present: int = 0
    skipped: int = 0
    refused: int = 0


class Warmer:
    """Fills a store. Each batch of chunks is durable before the next one begins; threads share the work."""

    def __init__(
        self,
        service: Prefiller,
        store: ChunkStore,
        *,
        fewest: int,
        most: int,
        places: int = PLACES,
        dtype: ChunkDtype = "model",
        flops: Callable[[int, int], float] = lambda tokens, before: 0.0,
        on_stored: Callable[[Ids, KeySpace], object] = lambda ids, space: None,
    ) -> None:
        """`fewest` tokens of a chunk are worth keeping; with its anchor it has at `most` so many. At a time they
        take so many `places` in the engine, or what one of them takes. Chunks are kept in
        `dtype`, not `auto`. `flops` is what computing so many tokens behind others takes; `on_stored` is told of each
        chunk that the store has."""
        self._flops = flops
        self._on_stored = on_stored
        self._service = service
        self._store = store
        self._fewest = fewest
        self._most = most
        self._places = places
        self._dtype: ChunkDtype = dtype
        self._computing: set[ChunkKey] = set()
        self._forgotten = Forgotten()
        self._anchors: OrderedDict[Anchor, KVBlock] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @property
    def now(self) -> float:
        """See Reuser.now."""
        return self._forgotten.now

    def warm(
        self,
        chunks: Mapping[Anchor, Sequence[Ids]],
        *,
        space: KeySpace,
        instead: Sequence[Anchor],
        priority: int,
        progress: Callable[[int, int], object] | None,
        wanted: float,
    ) -> WarmReport:
        """See Reuser.warm. `chunks` are distinct, by the anchor that each is to be computed after; who is stored after
        one of those `instead` is present."""
        outcomes: Counter[str] = Counter()
        total = sum(map(len, chunks.values()))
        for anchor, some in chunks.items():
            anchors = (anchor, *(one for one in instead if one != anchor))
            for batch in _batches(some, before=len(anchor), places=self._places):
                for outcome in self._warmed(batch, space, anchors, priority, wanted):
                    outcomes[outcome] += 1
                    if progress is not None:
                        progress(outcomes.total(), total)
        return WarmReport(**outcomes)

    def forget(self, chunks: Iterable[Ids], spaces: Sequence[KeySpace]) -> int:
        """Delete the chunks, under whatever anchors, in all these spaces; how many there were. What is being computed
        of them, or is wanted since before, is not kept."""
        of_each = [[space.key(ids).digest for space in spaces] for ids in chunks]
        names = list(chain(*of_each))
        self._forgotten.add(names)  # for whoever stores one meanwhile
        gone = self._store.delete_all(names)
        self._forgotten.add(names)  # for whoever still found one meanwhile, and wants it better
        return sum(any(gone[name] for name in some) for some in of_each)

    def _warmed(
        self, batch: Sequence[Ids], space: KeySpace, anchors: Sequence[Anchor], priority: int, wanted: float
    ) -> list[str]:
        """What became of each chunk of the batch: it is computed after the first of `anchors` unless it is stored under
        any of them."""
        anchor, keys = anchors[0], space.keys(dict.fromkeys(batch, anchors))
        outcomes: dict[Ids, str] = {}
        claimed: dict[Ids, ChunkKey] = {}
        try:
            for ids in batch:
                key = keys[ids][0]
                fits = self._fewest <= len(ids) <= self._most - len(anchor)
                if not fits or self._forgotten.since(key.digest, wanted):
                    outcomes[ids] = "skipped"
                elif not self._claim(key):
                    outcomes[ids] = "present"
                else:
                    claimed[ids] = key
                    if any(map(self._store.contains, keys[ids])):
                        outcomes[ids] = "present"
                        self._on_stored(ids, space)
            missing = [ids for ids in batch if ids not in outcomes]
            for ids, kv in zip(missing, self._computed(missing, anchor, priority), strict=True):
                flops = self._flops(len(ids), len(anchor))
                chunk = StoredChunk(ids, kv, len(anchor), flops=flops) if kv else None
                outcomes[ids] = self._kept(claimed[ids], chunk) if chunk else "skipped"
            self._store.flush()
            for ids in missing:
                if self._forgotten.since(claimed[ids].digest, wanted):
                    self._store.delete(claimed[ids])
                    outcomes[ids] = "skipped"
                elif outcomes[ids] == "computed":
                    self._on_stored(ids, space)
        finally:
            with self._lock:
                self._computing.difference_update(claimed.values())
        return [outcomes[ids] for ids in batch]

    def _claim(self, key: ChunkKey) -> bool:
        with self._lock:
            fresh = key not in self._computing
            self._computing.add(key)
            return fresh

    def _kept(self, key: ChunkKey, chunk: StoredChunk) -> str:
        return "computed" if self._store.put(key, chunk) else "refused"

    def _computed(self, chunks: Sequence[Ids], anchor: Anchor, priority: int) -> list[Block | None]:
        """Each chunk's KV after the anchor, on the CPU; None for what the engine's memory has no room for."""
        if not chunks:
            return []
        try:
            before = self._kv_of(anchor, priority) if anchor else None
            results = self._service.run_all([_request((*anchor, *ids), before, priority) for ids in chunks])
        except (ContextTooLong, Overloaded) as error:
            if len(chunks) == 1 and isinstance(error, Overloaded):
                raise
            if len(chunks) == 1:  # the engine's KV memory holds less than the model's context
                return [None]
            return [kv for ids in chunks for kv in self._computed([ids], anchor, priority)]
        return [_owned(result, skip=len(anchor), dtype=self._dtype) for result in results]

    def _kv_of(self, anchor: Anchor, priority: int) -> KVBlock:
        """The anchor's own KV, so that it is not computed again for each chunk. Of anchors that begin each other, as
        sinks do, only the longest one's is held, in host memory, for no budget of a device counts it; only what is new
        of it is computed."""
        with self._lock:
            held = next((one for one in self._anchors if _begins(one, anchor)), None)
            if held is not None:
                self._anchors.move_to_end(held)
                return self._anchors[held].part(0, len(anchor))
            shorter = max((one for one in self._anchors if _begins(anchor, one)), key=len, default=None)
            before = None if shorter is None else self._anchors[shorter]
        (result,) = self._service.run_all([_request(anchor, before, priority)])
        assert result.kv is not None, "the engine was asked for the KV"
        with self._lock:
            for one in [one for one in self._anchors if _begins(anchor, one)]:
                del self._anchors[one]
            self._anchors[anchor] = result.kv.mapped(lambda part: part.to("cpu"))
            if len(self._anchors) > _ANCHORS:
                self._anchors.popitem(last=False)
        return result.kv


def _begins(ids: Ids, so: Ids) -> bool:
    return ids[: len(so)] == so


def _request(ids: Ids, before: KVBlock | None, priority: int) -> GenerationRequest:
    """A prefill that stands at position 0, of which `before` is known."""
    return GenerationRequest(
        ids=ids,
        sampling=SamplingParams(max_tokens=0),
        reuse=None if before is None else Reuse(spans=(ReusedSpan(0, before),)),
        keep_kv=True,
        prefix_cache=False,
        priority=priority,
        request_id="kv-warm",
    )


def _owned(result: Result, *, skip: int, dtype: ChunkDtype) -> Block:
    """The KV behind the first `skip` tokens in `dtype`, on the CPU, in memory of its own."""
    assert result.kv is not None, "the engine was asked for the KV"
    return kept(result.kv.part(skip), dtype)


def _batches(chunks: Sequence[Ids], *, before: int, places: int) -> Iterator[list[Ids]]:
    """In order, as many as may be together behind an anchor of `before` tokens each, and at least one."""
    batch: list[Ids] = []
    for ids in chunks:
        more, tokens = len(batch) + 1, sum(map(len, batch)) + len(ids)
        if batch and (more > TOGETHER or tokens > TOKENS or tokens + more * before > places):
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch
