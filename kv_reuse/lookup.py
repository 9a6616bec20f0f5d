"""What of a prompt's chunks is stored: of each the best that there is, and after which anchor it should be computed."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from .anchors import Anchor, Anchors
from .index import Match
from .keys import ChunkKey, Ids, KeySpace
from .sights import Sights
from .store import ChunkStore, StoredChunk

_LOADERS = 8  # chunks that are read from slow tiers at a time: threads that wait, checksum and copy without the GIL
_REMEMBERED = 1 << 14  # chunks and prompts' anchors that came, and chunks that slow tiers have no better copy of
_MEMORY = ("device", "ram")  # tiers
_ABSENT_S = 60.0  # for which slow tiers are not asked again for a better chunk than there is in memory


class Looked(NamedTuple):
    """The best `chunk` that is stored, and the `anchor` after which it is worth computing; `poorer`: it was computed
    after another one, and that much worse that it should be computed anew. `sought`: it was in memory, but slow tiers
    were asked for a better one in vain. `sights` are what `Lookup.saw` takes once the prompt ran with it."""

    chunk: StoredChunk | None
    anchor: Anchor
    poorer: bool
    sights: tuple[bytes, ...]
    sought: bool = False


class _Wish(NamedTuple):
    """The `keys` of a chunk under the `anchors` that fit it, best first, of which the first `own` are the prompt's own.

    That at `best` is worth computing the chunk after; `again`: it came before where the same sink is, of those after
    which it can be computed, the nearest. `sights`: by what it is known when it comes there again.
    """

    anchors: tuple[Anchor, ...]
    keys: list[ChunkKey]
    own: int
    best: int
    again: bool
    sights: tuple[bytes, ...]

    def poorer(self, rank: int) -> bool:
        """Whether the chunk is worth computing anew where it is stored under the key of this place."""
        # Sinks differ little: for a chunk that comes once near such a place, another one is not worth a second copy.
        for_own, bare = self.best < self.own, rank == len(self.keys) - 1
        return rank > self.best and (for_own or bare or self.again)

    def looked(self, found: tuple[StoredChunk, int] | None, *, slow: bool) -> Looked:
        """Of a chunk, and the place of its key among `keys`; `slow` tiers were asked, too."""
        anchor = self.anchors[self.best]
        if found is None:
            return Looked(None, anchor, False, self.sights)
        chunk, rank = found
        return Looked(chunk, anchor, self.poorer(rank), self.sights, slow and rank > 0 and chunk.tier in _MEMORY)


class Lookup:
    """Looks chunks up in a store, under the anchors that fit them. For any thread; blocks on the store."""

    def __init__(self, store: ChunkStore, anchors: Anchors, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._anchors = anchors
        self._clock = clock
        # Until when, and how many of a chunk's keys, the best first, were not there; by the first of them, ascending.
        self._absent: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="chunk-load")  # they end with this
        self._sights = Sights(most=_REMEMBERED)

    def look(
        self, places: Sequence[Match], space: KeySpace, *, own: Sequence[Anchor], sight: bool
    ) -> dict[Ids, Looked]:
        """Each chunk of `places`, which ascend, in a prompt whose `own` anchors are these, the longest one first.

        `sight`: this is one more time that they came, which counts for later ones when `saw` is told. What has to be
        waited for is read beside each other, what is in memory is not.
        """
        wishes = self._wishes(places, space, own, sight)
        ranks = {ids: self._at_hand(wish) for ids, wish in wishes.items()}
        quick = {ids: self._best(ids, wishes[ids].keys, rank) for ids, rank in ranks.items() if rank is not None}
        # What left memory since is looked for in the slow tiers, under the better keys as well.
        found = {ids: one for ids, one in quick.items() if one is not None or ranks[ids] == 0}
        slow = [ids for ids in wishes if ids not in found]
        best = partial(map, self._best) if len(slow) < 2 else partial(self._loaders.map, self._best)
        found.update(zip(slow, best(slow, [wishes[ids].keys for ids in slow]), strict=True))
        looked = {ids: wish.looked(found[ids], slow=ids in slow) for ids, wish in wishes.items()}
        sought = ((ids, found[ids]) for ids, one in looked.items() if one.sought)
        self._note_absent((wishes[ids].keys[0], one[1]) for ids, one in sought if one is not None)
        return looked

    def saw(self, sights: Iterable[bytes]) -> None:
        """What was looked up, known by these, ran so in a prompt."""
        for sight in sights:
            self._sights.add(sight)

    def _wishes(self, places: Sequence[Match], space: KeySpace, own: Sequence[Anchor], sight: bool) -> dict[Ids, _Wish]:
        before: dict[Ids, int] = {}
        for place in places:  # the rows of a chunk's middle have seen what is before it in the chunk, too
            before.setdefault(place.chunk, max(0, place.start - place.offset))
        fitting = {ids: self._anchors.fitting(tokens, own) for ids, tokens in before.items()}
        wishes: dict[Ids, _Wish] = {}
        for ids, keys in space.keys(fitting).items():
            prompt = bytes.fromhex(keys[0].anchor) if own else None  # known by its own longest anchor
            first = 0 if prompt and self._sights.times(prompt) + sight > 1 else len(own)
            best = self._anchors.computed_after(fitting[ids], len(ids), first=first)
            near = _mark(keys[max(best, len(own))]) if len(keys) - len(own) > 2 else None  # there are several sinks
            again = near is not None and self._sights.times(near) + sight > 1
            sights = tuple(one for one in (prompt, near) if one is not None)
            wishes[ids] = _Wish(fitting[ids], keys, len(own), best, again, sights)
        return wishes

    def _at_hand(self, wish: _Wish) -> int | None:
        """The place of the best key that is in memory; None where slow tiers are to be asked for better ones first."""
        rank = next((rank for rank, key in enumerate(wish.keys) if self._store.at_hand(key)), None)
        # What would be computed anew may have been computed by somebody else: only then the slow tiers are asked, and
        # not again for a while. A better copy than one that is kept as it is would not be worth waiting for either.
        wanting = rank is None or (wish.poorer(rank) and not self._is_absent(wish.keys[0], rank))
        return None if wanting else rank

    def _note_absent(self, keys: Iterable[tuple[ChunkKey, int]]) -> None:
        with self._lock:
            for key, count in keys:
                self._absent[_mark(key)] = self._clock() + _ABSENT_S, count
                self._absent.move_to_end(_mark(key))
                if len(self._absent) > _REMEMBERED:
                    self._absent.popitem(last=False)

    def _is_absent(self, key: ChunkKey, count: int) -> bool:
        """Whether the first `count` of a chunk's keys, of which this one is the first, were not there."""
        with self._lock:
            until, absent = self._absent.get(_mark(key), (0.0, 0))
            return until > self._clock() and absent >= count

    def _best(self, ids: Ids, keys: Sequence[ChunkKey], first: int = 0) -> tuple[StoredChunk, int] | None:
        """The chunk under the first of `keys[first:]` that is stored, and that key's place in `keys`. A chunk that is
        nowhere counts as one miss."""
        for rank in self._stored(keys, first):
            chunk = self._store.get(keys[rank])
            if chunk is not None:
                assert chunk.ids == ids, "a content key must not name other content"
                return chunk, rank
        return None

    def _stored(self, keys: Sequence[ChunkKey], first: int) -> Iterator[int]:
        """The places of those that are stored, each when the one before was no good; `first` if there are none."""
        none = True
        for rank in range(first, len(keys)):
            if self._store.contains(keys[rank]):
                none = False
                yield rank
        if none:
            yield first


def _mark(key: ChunkKey) -> bytes:
    """A chunk and an anchor, for one tenant of one model."""
    return bytes.fromhex(key.digest[:32] + key.anchor[:32])
