"""The pages of sequences: found in the prefix tree and the tiers, taken, grown, shared, given back.

Who gets any, and who loses some for it, is the scheduler's.
"""

import numpy as np

from .kept_blends import KeptBlend, KeptBlends, Marks, marked
from .pages import PageAllocator, Pages
from .pool import KVPool
from .radix import Match, RadixTree, common_tokens
from .sequence import NO_PAGES, Phase, Rows, Sequence
from .span_loads import SpanLoader, SpanWriter, together
from .table import RunningTable
from .tiers.base import Loads, PrefixTier
from .tiers.empty import NO_LOADS
from .types import Blending

_NO_MATCH = Match(NO_PAGES, -1, 0, 0)


class SequencePages:
    """What the scheduler does with pages. For one thread; `table` follows every change."""

    def __init__(
        self,
        *,
        pool: KVPool,
        allocator: PageAllocator,
        tree: RadixTree,
        kept: KeptBlends,
        tier: PrefixTier,
        spans: SpanLoader | SpanWriter,
        table: RunningTable,
    ) -> None:
        self._pool = pool
        self._size = pool.page_size
        self._allocator = allocator
        self._tree = tree
        self._kept = kept
        self._tier = tier
        self._spans = spans
        self._carried: Loads = NO_LOADS
        self._table = table

    def match(self, sequence: Sequence) -> Match:
        """What the prefix tree has of a sequence now: all but the last token may be. Notes the blended prompt that it
        is part of, where that gives more than what is exact."""
        sequence.kept = None
        if not sequence.shares:
            return _NO_MATCH
        plain, kept = self._known(sequence, ()), self._begun(sequence)
        if kept is None or plain.tokens >= kept.tokens:
            return plain
        longer = self._known(sequence, kept.marks)
        if self._reach(sequence, longer, kept.marks) <= self._reach(sequence, plain, ()):
            return plain
        sequence.kept = kept
        return longer

    def _known(self, sequence: Sequence, marks: Marks) -> Match:
        return self._tree.match(marked(sequence.ids[:-1], marks), namespace=sequence.request.namespace)

    def _reach(self, sequence: Sequence, match: Match, marks: Marks) -> int:
        """How many tokens tree and tiers have now."""
        behind = self._tier.match(self._names(sequence, marks)[len(match.pages) :])
        return max(match.tokens, (len(match.pages) + behind) * self._size)

    def _begun(self, sequence: Sequence) -> KeptBlend | None:
        """The blended prompt that a sequence begins with, if it may go on from there; parts of it may be gone."""
        wanted = sequence.request.blending
        if wanted is None:
            return None
        return self._kept.find(sequence.ids, self._digests(sequence, sequence.length - 1), wanted)

    def _digests(self, sequence: Sequence, tokens: int) -> list[bytes]:
        whole = tokens // self._size
        if len(sequence.digests) < whole:
            sequence.digests = self._kept.digests(sequence.ids, namespace=sequence.request.namespace)
        return sequence.digests[:whole]

    def placed(self, sequence: Sequence, *, spare: int) -> Match | None:
        """The prefix hit with which there are pages for a sequence now, and `spare` ones beside."""
        match = self.match(sequence)
        if match.partial >= 0 and not self._fits(sequence, match, spare):
            match = self.whole(match)
        return match if self._fits(sequence, match, spare) else None

    def _fits(self, sequence: Sequence, match: Match, spare: int) -> bool:
        held, lacking = _held(match), self._missing(sequence, match) + spare - self._allocator.free
        if lacking <= 0 or lacking + len(held) <= self._tree.surely_evictable:  # without a look at the whole pool
            return True
        unused = int(np.count_nonzero(self._allocator.refs(held) == 1))
        return self._tree.evictable - unused >= lacking

    def _missing(self, sequence: Sequence, match: Match) -> int:
        return -(-sequence.length // self._size) - len(match.pages)

    def whole(self, match: Match) -> Match:
        """The match without its partly matching page."""
        return Match(match.pages, -1, 0, len(match.pages) * self._size)

    def shared_prefix(self, sequence: Sequence, leader: Sequence) -> int:
        """How many tokens of a sequence a prefilling one will have put into the prefix tree when it is done."""
        namespaces = sequence.request.namespace, leader.request.namespace
        if leader.phase is not Phase.PREFILL or not leader.shares or namespaces[0] != namespaces[1]:
            return 0
        common = common_tokens(sequence.ids[:-1], leader.ids)
        wanted, kept = sequence.request.blending, self._keeps(leader)
        goes_on = wanted is not None and kept is not None and kept.serves(wanted)
        if goes_on and common_tokens(sequence.ids, leader.ids) >= leader.prompt:
            return leader.prompt  # only when all of it is computed is it kept
        exact = leader.limit if leader.kept is None else min(leader.limit, leader.kept.exact)
        return min(common, exact) // self._size * self._size

    def _keeps(self, sequence: Sequence) -> Blending | None:
        """How well a prefilling sequence's prompt will be blended, if it will be kept as such."""
        request = sequence.request
        if request.blending is None or request.reuse is None or not sequence.spans or not sequence.shares:
            return None
        before = 1.0 if sequence.kept is None else sequence.kept.blending.ratio
        return Blending(request.blending.way, min(before, request.reuse.share))

    def keep(self, sequence: Sequence) -> None:
        """The prompt is computed: what was blended of it may be found from now on, under a key of its own."""
        blending = self._keeps(sequence)
        if blending is None:
            return
        ids, digests = sequence.ids[: sequence.prompt], self._digests(sequence, sequence.prompt - 1)
        kept = self._kept.add(ids, digests, blending, start=sequence.spans[0].start, behind=sequence.kept)
        if kept is not None:
            sequence.kept, sequence.marks, sequence.limit = kept, kept.marks, sequence.most

    def fetches(self, sequence: Sequence) -> bool:
        """Whether to wait for what a slow tier has of this one's prompt; it is asked once."""
        if sequence.fetch is None:
            kept = self._begun(sequence) if sequence.shares else None
            marks = () if kept is None else kept.marks
            names = self._names(sequence, marks)
            known = len(self._known(sequence, marks).pages) if names else 0
            sequence.fetch = self._tier.fetch(names[known:])
        return not sequence.fetch.done

    def _names(self, sequence: Sequence, marks: Marks) -> list[bytes]:
        """The names of all whole pages that may be loaded: all but the last token's."""
        naming = self._tier.naming
        if naming is None or not sequence.shares:
            return []
        names, whole = sequence.names.setdefault(marks, []), (sequence.length - 1) // self._size
        if len(names) < whole:
            before = names[-1] if names else naming.start(sequence.request.namespace)
            names += naming.extend(before, marked(sequence.ids, marks)[len(names) * self._size : whole * self._size])
        return names[:whole]

    def stored(self, sequence: Sequence, match: Match) -> list[bytes]:
        """The pages behind a match that a tier can load at once, by name."""
        names = self._names(sequence, () if sequence.kept is None else sequence.kept.marks)[len(match.pages) :]
        return names[: self._tier.match(names)]

    def take(self, sequence: Sequence, match: Match) -> None:
        """Share a match's whole pages, copy the partly matching one, and take fresh ones for the rest."""
        held, missing = _held(match), self._missing(sequence, match)
        self._allocator.ref(held)
        self.evict(missing - self._allocator.free)
        fresh = self._allocator.alloc(missing, after=int(match.pages[-1]) if len(match.pages) else -1)
        self._tier.claim(fresh)
        self._table.set_pages(sequence, np.concatenate((match.pages, fresh)))  # from here on `discard` knows them
        if match.partial >= 0:
            try:
                self._pool.copy(match.partial, int(fresh[0]), tokens=match.partial_tokens)
            finally:
                self._allocator.unref(held[-1:])

    def load(self, sequence: Sequence, stored: list[bytes], *, first: int) -> int:
        """Have the tier load stored pages into the sequence's, from its page `first` on; how many tokens that is."""
        return self._tier.load(stored, sequence.pages[first : first + len(stored)]) * self._size

    def short(self, sequence: Sequence, *, ahead: int = 0) -> bool:
        """Whether there is no place for the newest token's KV, or that of the token `ahead` of it."""
        return len(sequence.pages) * self._size < sequence.length + ahead

    def write_spans(self, sequence: Sequence) -> None:
        """Have the KV of the reused spans brought to where the sequence reads it, before the next step does."""
        spans = sequence.spans
        if spans:
            places = np.concatenate([np.arange(span.start, span.stop) for span in spans])
            self._spans.add(spans, self._table.slots_of(sequence, places), wanted=lambda: sequence.spans is spans)

    def loads(self) -> Loads:
        """All that is on its way into the pool for the next step, which must wait for it, whoever asked for it."""
        self._carried = together(self._carried, self._tier.loads())  # still to be waited for if the device now fails
        spans = self._spans.loads()
        carried, self._carried = self._carried, NO_LOADS
        return together(carried, spans)

    def settle_loads(self) -> None:
        """After a failed step: whatever is under way comes before anybody else writes. Reused spans that are not begun
        wait for the next step."""
        self._carried.settle()
        self._carried = NO_LOADS
        self._tier.loads().settle()

    def carry(self, loads: Loads) -> None:
        """What a step did not wait for is the next one's; all of it is under way from now on."""
        loads.begin()
        self._carried = loads

    def extend(self, sequence: Sequence, pages: int = 1) -> None:
        """Give a sequence more pages, which are free."""
        fresh = self._allocator.alloc(pages, after=int(sequence.pages[-1]))
        self._tier.claim(fresh)
        self._table.set_pages(sequence, np.concatenate((sequence.pages, fresh)))

    def backed(self, sequences: list[Sequence], drafts: list[Rows]) -> list[Rows]:
        """As much of the drafts as there are pages for: only free ones are taken, and nobody loses any."""
        backed = []
        for sequence, draft in zip(sequences, drafts, strict=False):
            missing = -(-(sequence.length + len(draft)) // self._size) - len(sequence.pages)
            taken = min(missing, self._allocator.free)
            if taken > 0:
                self.extend(sequence, taken)
            backed.append(draft[: len(sequence.pages) * self._size - sequence.length])
        return backed if any(map(len, backed)) else []

    def settle(self, sequence: Sequence) -> None:
        """Give back the pages that a draft was given and its accepted tokens do not need."""
        keep = -(-sequence.length // self._size)
        if sequence.phase is Phase.DECODE and len(sequence.pages) > keep:
            self._allocator.unref(sequence.pages[keep:])
            self._table.set_pages(sequence, sequence.pages[:keep])

    def evict(self, wanted: int) -> int:
        """Have the prefix tree free `wanted` pages, and some more where a batch costs a tier no more than a few."""
        return self._tree.evict(max(wanted, self._tier.batch)) if wanted > 0 else 0

    def share(self, sequence: Sequence, *, tail: bool = False, grows: bool = False) -> None:
        """Give the prefix tree what it may know of a sequence's KV. See RadixTree.insert."""
        known = sequence.storable
        if known:
            namespace, keys = sequence.request.namespace, marked(sequence.ids[:known], sequence.marks)
            pages = self._tree.insert(keys, sequence.pages, namespace=namespace, tail=tail, grows=grows)
            self._table.set_pages(sequence, pages)

    def release(self, sequence: Sequence) -> None:
        """Give all of a sequence's pages back. Whoever gets them must not be overwritten by what was to come here."""
        self._carried.settle()
        self._carried = NO_LOADS
        self._allocator.unref(sequence.pages)


def _held(match: Match) -> Pages:
    return match.pages if match.partial < 0 else np.append(match.pages, np.int32(match.partial))
