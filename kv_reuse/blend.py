"""From a prompt and its chunks to the engine's reused spans: look up, move, name what is missing, compute it ahead.

Not here: which texts are chunks (the caller knows), and the blended forward itself (the engine's).
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..backend_engine.rope import LayerRopes
from ..backend_engine.spec import ModelSpec
from ..backend_engine.types import GenerationRequest, KVBlock, Result, Reuse, ReusedSpan, RowSelector, SamplingParams
from ..prompt.errors import BadRequest, ContextTooLong
from .keys import ChunkKey, KeySpace
from .reposition import repositioned, require_movable
from .selectors import KVDeviation
from .store import ChunkStore, StoredChunk, TierStats

MODES = ("off", "prefix", "reuse", "blend")
"""Nothing, the engine's prefix tree alone, chunks as they are, chunks with selective recompute."""


class Prefiller(Protocol):
    """The part of the engine's service that computes a chunk: blocks until the request is finished."""

    def run(self, request: GenerationRequest) -> Result: ...


class SpanHit(NamedTuple):
    """A span whose KV was found: where it begins, how many tokens are loaded, and which tier had them."""

    start: int
    tokens: int
    tier: str


class ReusePlan(NamedTuple):
    """`reuse` goes into the engine's request (None: nothing was found). `misses` are chunks to `warm` for next time."""

    reuse: Reuse | None
    hits: tuple[SpanHit, ...]
    misses: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReport:
    """Distinct chunks of one `warm`, by what became of them.

    `present` were stored, or being computed by another thread; `skipped` are shorter than is worth keeping or longer
    than the model's context or the engine's memory; `refused` were computed but the store did not keep them.
    """

    computed: int = 0
    present: int = 0
    skipped: int = 0
    refused: int = 0


class Reuser:
    """Plans the reuse of stored chunks and fills the store, for one model.

    `salt` separates tenants; a call may name another one than the reuser's own. Chunks under `min_tokens` are neither
    looked up nor stored: loading and moving them costs about what computing them does. Raises ConfigError for a model
    whose rope type cannot be moved. All methods block on the store or on the engine: call them from worker threads.
    """

    def __init__(
        self,
        service: Prefiller,
        store: ChunkStore,
        *,
        spec: ModelSpec,
        fingerprint: str,
        salt: str = "",
        min_tokens: int = 32,
        device: str = "cpu",
    ) -> None:
        require_movable(spec.ropes)
        assert min_tokens >= 1, min_tokens
        self._service = service
        self._store = store
        self._spec = spec
        self._ropes = LayerRopes(spec.ropes, device)
        self._fingerprint = fingerprint
        self._salt = salt
        self._min_tokens = min_tokens
        self._computing: set[ChunkKey] = set()
        self._lock = threading.Lock()

    def plan(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        *,
        mode: str = "blend",
        ratio: float = 0.15,
        selector: RowSelector | None = None,
        salt: str | None = None,
    ) -> ReusePlan:
        """Look up the chunks `ids[start : start + length]` of `spans`, disjoint and in any order.

        The prompt's last token is never loaded, because its logits are needed. In mode "blend", `ratio` of the loaded
        rows are recomputed, chosen by `selector` (by default KVDeviation). Raises BadRequest for a mode, ratio or
        selector that cannot be honoured.
        """
        chosen = self._selector(mode, ratio, selector)
        if mode in ("off", "prefix"):
            return ReusePlan(None, (), ())
        space = self._space(salt)
        found: dict[ChunkKey, StoredChunk | None] = {}
        placed: list[ReusedSpan] = []
        hits: list[SpanHit] = []
        misses: dict[tuple[int, ...], None] = {}
        for start, length in self._worthwhile(spans, len(ids)):
            chunk_ids = tuple(ids[start : start + length])
            key = space.key(chunk_ids)
            if key not in found:
                found[key] = self._store.get(key)
            chunk = found[key]
            if chunk is None:
                misses[chunk_ids] = None
                continue
            assert chunk.ids == chunk_ids, "a content key must not name other content"
            span = self._placed(chunk, start, min(length, len(ids) - 1 - start))
            placed.append(span)
            hits.append(SpanHit(start, span.kv.tokens, chunk.tier))
        reuse = Reuse(spans=tuple(placed), selector=chosen, ratio=ratio) if placed else None
        return ReusePlan(reuse, tuple(hits), tuple(misses))

    def warm(
        self,
        chunks: Sequence[Sequence[int]],
        *,
        progress: Callable[[int, int], object] | None = None,
        salt: str | None = None,
        priority: int = -1,
    ) -> WarmReport:
        """Compute and store what is missing of `chunks` (token ids), one after the other at the engine's `priority`.

        Each chunk is made durable before the next, so an interrupted run is resumed by calling again.
        `progress(done, total)` counts distinct chunks. The engine's errors pass through.
        """
        distinct = list(dict.fromkeys(tuple(chunk) for chunk in chunks))
        outcomes: Counter[str] = Counter()
        for done, ids in enumerate(distinct, start=1):
            outcomes[self._warm_one(ids, self._space(salt), priority)] += 1
            if progress is not None:
                progress(done, len(distinct))
        return WarmReport(**outcomes)

    def forget(self, chunks: Sequence[Sequence[int]], *, salt: str | None = None) -> int:
        """Delete the KV of `chunks`; how many there were."""
        space = self._space(salt)
        return sum(self._store.delete(space.key(ids)) for ids in {tuple(chunk) for chunk in chunks})

    def stats(self) -> tuple[TierStats, ...]:
        """The store's counters, fastest tier first."""
        return self._store.stats()

    def _space(self, salt: str | None) -> KeySpace:
        return KeySpace(self._fingerprint, self._salt if salt is None else salt)

    def _selector(self, mode: str, ratio: float, selector: RowSelector | None) -> RowSelector | None:
        if mode not in MODES:
            raise BadRequest(f"there is no reuse mode {mode!r}; there are: {', '.join(MODES)}", param="reuse.mode")
        if not 0.0 <= ratio <= 1.0:
            raise BadRequest(f"the recompute ratio must be between 0 and 1, got {ratio}", param="reuse.ratio")
        if mode != "blend" or ratio == 0.0:
            return None
        chosen = selector if selector is not None else KVDeviation()
        if not 0 <= chosen.layer < self._spec.layers:
            raise BadRequest(
                f"the selector looks at layer {chosen.layer}, but the model's layers are 0 to {self._spec.layers - 1}",
                param="reuse.selector.layer",
            )
        return chosen

    def _worthwhile(self, spans: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
        end, kept = 0, []
        for start, length in sorted(spans):
            assert end <= start and length > 0 and start + length <= total, (spans, total)
            end = start + length
            if self._worth(length) and min(length, total - 1 - start) > 0:
                kept.append((start, length))
        return kept

    def _worth(self, tokens: int) -> bool:
        return self._min_tokens <= tokens <= self._spec.max_context

    def _placed(self, chunk: StoredChunk, start: int, tokens: int) -> ReusedSpan:
        part = KVBlock(chunk.kv.k[:, :tokens], chunk.kv.v[:, :tokens])
        return ReusedSpan(start, repositioned(part, self._ropes, old=chunk.position, new=start))

    def _warm_one(self, ids: tuple[int, ...], space: KeySpace, priority: int) -> str:
        if not self._worth(len(ids)):
            return "skipped"
        key = space.key(ids)
        with self._lock:
            if key in self._computing:
                return "present"
            self._computing.add(key)
        try:
            if self._store.contains(key):
                return "present"
            kept = self._store.put(key, StoredChunk(ids, self._compute(ids, priority)))
            self._store.flush()
            return "computed" if kept else "refused"
        except ContextTooLong:  # its KV memory holds less than the model's context
            return "skipped"
        finally:
            with self._lock:
                self._computing.discard(key)

    def _compute(self, ids: tuple[int, ...], priority: int) -> KVBlock:
        """The chunk's KV as if nothing stood before it, on the CPU: [layers, tokens, kv_heads, head_dim]."""
        sampling = SamplingParams(max_tokens=0)
        request = GenerationRequest(
            ids=ids, sampling=sampling, keep_kv=True, prefix_cache=False, priority=priority, request_id="kv-warm"
        )
        kv = self._service.run(request).kv
        assert kv is not None and kv.tokens == len(ids), (kv, len(ids))
        return KVBlock(kv.k.to("cpu").contiguous(), kv.v.to("cpu").contiguous())
