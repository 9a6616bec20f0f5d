"""From a prompt and its chunks to the engine's reused spans: look up, move, name what is missing, compute it ahead.

Which texts are chunks the caller knows, or `finder` does. Not here: the blended forward itself (the engine's).
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from ..backend_engine.rope import LayerRopes
from ..backend_engine.spec import ModelSpec
from ..backend_engine.types import Reuse, ReusedSpan
from ..prompt.errors import BadRequest
from .anchors import BARE, Anchor, Anchors
from .cuts import Breaks
from .finding import Finder, Span
from .index import Match
from .keys import Ids, KeySpace
from .lookup import Lookup
from .recompute import prefill_flops
from .reposition import repositioned, require_movable
from .rounding import ChunkDtype, chosen_dtype, chunk_fingerprint, chunk_fingerprints
from .selectors import AUTO, Repair
from .store import ChunkStore, StoredChunk, TierStats
from .warm import PLACES, SHARE, Prefiller, Warmer, WarmReport

MODES = ("off", "prefix", "reuse", "blend")
"""Nothing, the engine's prefix tree alone, chunks as they are, chunks with selective recompute."""


class SpanHit(NamedTuple):
    """A span whose KV was found: where it begins, how many tokens are loaded, which tier had them, and how many tokens
    the anchor had after which they were computed."""

    start: int
    tokens: int
    tier: str
    anchor: int


class ReusePlan(NamedTuple):
    """`reuse` goes into the engine's request (None: nothing was found).

    `misses` were not found, of chunks that can be computed here. `poorer` were found, but under an anchor that fits
    less well, and came so before. For next time, each of both is to be warmed after its one of `anchors`, or bare where
    it has none there. `sought`: slow tiers were asked in vain for better ones than there are in memory, so that the
    time says little of the tiers of `hits`. `sights` is by what it all is known when it comes again (`Reuser.saw`).
    """

    reuse: Reuse | None
    hits: tuple[SpanHit, ...]
    misses: tuple[Ids, ...]
    poorer: tuple[Ids, ...] = ()
    anchors: Mapping[Ids, Anchor] = MappingProxyType({})
    sought: bool = False
    sights: tuple[bytes, ...] = ()

    def by_anchor(self, chunks: Sequence[Ids]) -> dict[Anchor, list[Ids]]:
        """Misses or poorer ones by the anchor that they are to be warmed after."""
        together: dict[Anchor, list[Ids]] = defaultdict(list)
        for chunk in chunks:
            together[self.anchors.get(chunk, BARE)].append(chunk)
        return dict(together)


class Reuser:
    """Plans the reuse of stored chunks and fills the store, for one model.

    `salt` separates tenants; a call may name another one than the reuser's own. `sinks` are anchors of different
    lengths that serve any prompt; chunks are computed after those of at most `longest_sink` tokens (None: any), or the
    shortest, and looked up under all. `memory` is how many tokens the engine's KV memory holds (None: enough). Chunks
    under `min_tokens` are neither looked up nor stored: loading and moving them costs about what computing them does.
    `breaks` says behind which tokens text may be cut (see Finder). Chunks are kept in `dtype`; those of another one are
    not found. `fingerprint` is that of the model's KV.
    Raises ConfigError for a model whose rope type cannot be moved. All methods block on the store or on the engine:
    call them from worker threads.
    """

    def __init__(
        self,
        service: Prefiller,
        store: ChunkStore,
        *,
        spec: ModelSpec,
        fingerprint: str,
        salt: str = "",
        sinks: Sequence[Sequence[int]] = (),
        longest_sink: int | None = None,
        memory: int | None = None,
        min_tokens: int = 32,
        breaks: Breaks | None = None,
        device: str = "cpu",
        dtype: ChunkDtype = "auto",
    ) -> None:
        require_movable(spec.ropes)
        assert min_tokens >= 1, min_tokens
        dtype = chosen_dtype(dtype, device)
        self._kinds = chunk_fingerprints(fingerprint)
        fingerprint = chunk_fingerprint(fingerprint, dtype)
        self._store = store
        self.finder = Finder(store, fingerprint=fingerprint, breaks=breaks, shortest=min_tokens)
        self._spec = spec
        self._ropes = LayerRopes(spec.ropes, device)
        self._fingerprint = fingerprint
        self._salt = salt
        room = spec.max_context if memory is None else min(spec.max_context, memory)
        self._room = room
        self._anchors = Anchors(sinks, room=room, longest=sys.maxsize if longest_sink is None else longest_sink)
        self._lookup = Lookup(store, self._anchors)
        self._min_tokens = min_tokens
        self._warmer = Warmer(
            service,
            store,
            fewest=min_tokens,
            most=room,
            places=PLACES if memory is None else min(PLACES, memory // SHARE),
            dtype=dtype,
            flops=lambda tokens, before: prefill_flops(spec, tokens, before=before),
            on_stored=lambda ids, space: self.finder.know(ids, salt=space.salt),
        )

    def plan(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        *,
        mode: str = "blend",
        ratio: float = 0.15,
        repair: Repair = AUTO,
        salt: str | None = None,
        anchors: Sequence[Sequence[int]] = (),
        found: Sequence[Match] = (),
        sight: bool = True,
    ) -> ReusePlan:
        """Look up the chunks `ids[start : start + length]` of `spans`, disjoint and in any order, and those that
        `finder` has found beside them.

        Of a chunk that is stored under several anchors, the best one is taken: the longest of `anchors` that the prompt
        begins with, before its first chunk; then the sink whose length is nearest to where the chunk (first) stands;
        then the chunk computed bare. What is better than what there is is worth computing from the second time on, of
        the prompt's own anchor or of the chunk near such a place; `sight` says whether this is such a time, and `saw`
        is to be told of the plan once it ran.
        The prompt's last token is never loaded, because its logits are needed. In mode "blend", `ratio` of the loaded
        rows are recomputed, chosen as `repair` says. Raises BadRequest for a mode, ratio or selector that cannot be
        honoured.
        """
        repair = self._repair(mode, ratio, repair)
        places = self._worthwhile([*(_whole(ids, span) for span in spans), *found], len(ids))
        if mode in ("off", "prefix") or not places:
            return ReusePlan(None, (), ())
        space = self._space(salt)
        own = self._anchors.own(ids, anchors, before=places[0].start)
        looked = self._lookup.look(places, space, own=own, sight=sight)
        placed: list[ReusedSpan] = []
        hits: list[SpanHit] = []
        for place in places:
            chunk = looked[place.chunk].chunk
            if chunk is not None:
                span = self._placed(chunk, place, min(place.length, len(ids) - 1 - place.start))
                placed.append(span)
                hits.append(SpanHit(place.start, span.kv.tokens, chunk.tier, chunk.position))
        gone = [chunk for chunk, one in looked.items() if one.chunk is None]
        for chunk in gone:  # what is found from now on is there; what is missed is cut anew, or warmed by its caller
            self.finder.forget(chunk, salt=space.salt)
        cut_anew = {match.chunk for match in found}
        # What the engine has no room for is found where another gateway computed it, and computed by none here.
        misses = tuple(chunk for chunk in gone if chunk not in cut_anew and len(chunk) <= self._room)
        poorer = tuple(chunk for chunk, one in looked.items() if one.poorer)
        return ReusePlan(
            reuse=Reuse(spans=tuple(placed), selector=repair.selector, chooser=repair.chooser, ratio=ratio)
            if placed
            else None,
            hits=tuple(hits),
            misses=misses,
            poorer=poorer,
            anchors={chunk: anchor for chunk in misses + poorer if (anchor := looked[chunk].anchor)},
            sought=any(one.sought for one in looked.values()),
            sights=tuple({sight for one in looked.values() for sight in one.sights}),
        )

    def saw(self, plan: ReusePlan) -> None:
        """A request ran with this plan: what it looked up came once more. Blocks on nothing."""
        self._lookup.saw(plan.sights)

    def warm(
        self,
        chunks: Sequence[Sequence[int]],
        *,
        anchor: Sequence[int] | None = None,
        progress: Callable[[int, int], object] | None = None,
        salt: str | None = None,
        priority: int = -1,
        wanted: float | None = None,
    ) -> WarmReport:
        """Compute and store what is missing of `chunks` (token ids) after `anchor`, at the engine's `priority`. By
        default, for nobody knows where they will stand, that is the sink of a middle length, or a shorter one that
        leaves room, and only what is stored after no sink is missing.

        `wanted` is the moment (`now`) from which on this is wanted, by default that of the call: a chunk that was
        forgotten since is not computed, one that is forgotten meanwhile not kept. A few chunks at a time are computed
        together and made durable, so an interrupted run is resumed by calling again. `progress(done, total)` counts
        distinct chunks. The engine's errors pass through.
        """
        by_anchor: dict[Anchor, list[Ids]] = defaultdict(list)
        for ids in dict.fromkeys(tuple(chunk) for chunk in chunks):
            by_anchor[self._anchors.general(len(ids)) if anchor is None else tuple(anchor)].append(ids)
        return self._warmer.warm(
            by_anchor,
            space=self._space(salt),
            instead=self._anchors.sinks if anchor is None else (),
            priority=priority,
            progress=progress,
            wanted=self.now if wanted is None else wanted,
        )

    @property
    def now(self) -> float:
        """The moment, for `warm`: a reading of time.perf_counter."""
        return self._warmer.now

    def forget(self, chunks: Sequence[Sequence[int]], *, salts: Sequence[str] | None = None) -> int:
        """Delete the KV of `chunks` of each of these `salts`, by default the reuser's own, under whatever anchors and
        in whatever dtypes; how many of the chunks there were. However many, each tier is gone through once."""
        salts = (self._salt,) if salts is None else salts
        distinct = {tuple(chunk) for chunk in chunks}
        for ids, salt in product(distinct, salts):
            self.finder.forget(ids, salt=salt)
        return self._warmer.forget(distinct, [KeySpace(kind, salt) for kind, salt in product(self._kinds, salts)])

    def stats(self) -> tuple[TierStats, ...]:
        """The store's counters, fastest tier first."""
        return self._store.stats()

    def _space(self, salt: str | None) -> KeySpace:
        return KeySpace(self._fingerprint, self._salt if salt is None else salt)

    def _repair(self, mode: str, ratio: float, repair: Repair) -> Repair:
        if mode not in MODES:
            raise BadRequest(f"there is no reuse mode {mode!r}; there are: {', '.join(MODES)}", param="reuse.mode")
        if not 0.0 <= ratio <= 1.0:
            raise BadRequest(f"the recompute ratio must be between 0 and 1, got {ratio}", param="reuse.ratio")
        if mode != "blend" or ratio == 0.0:
            return Repair()
        if repair.selector is not None and not 0 <= repair.selector.layer < self._spec.layers:
            raise BadRequest(
                f"the selector looks at layer {repair.selector.layer}, but the model has 0 to {self._spec.layers - 1}",
                param="reuse.selector.layer",
            )
        return repair

    def _worthwhile(self, places: Sequence[Match], total: int) -> list[Match]:
        end, kept = 0, []
        for place in sorted(places):
            assert end <= place.start and place.length > 0 and place.stop <= total, (places, total)
            end = place.stop
            if self._worth(len(place.chunk)) and min(place.length, total - 1 - place.start) > 0:
                kept.append(place)
        return kept

    def _worth(self, tokens: int) -> bool:
        return self._min_tokens <= tokens <= self._spec.max_context

    def _placed(self, chunk: StoredChunk, place: Match, tokens: int) -> ReusedSpan:
        block = chunk.kv.part(place.offset, place.offset + tokens)
        old = chunk.position + place.offset
        if self._ropes.device.type != "cpu":  # there the engine moves it, layer by layer beside its steps
            return ReusedSpan(place.start, block, old)
        return ReusedSpan(place.start, repositioned(block.widened(), self._ropes, old=old, new=place.start))


def _whole(ids: Sequence[int], span: Span) -> Match:
    start, length = span
    return Match(start, length, tuple(ids[start : start + length]), 0)
