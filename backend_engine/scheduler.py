"""What runs in the next step: decodes first, then chunks of prefills, under one budget of rows.

It also owns every move of pages: admission (prefix hit, copy-on-write, reused spans), growth, preemption by recompute,
release.
"""

import time
from bisect import insort
from dataclasses import dataclass, replace

import numpy as np
import torch

from .fair_queue import FairQueue
from .options import EngineOptions
from .pace import Pace
from .pages import PageAllocator, Pages
from .pool import KVPool
from .prefill_shares import shares
from .radix import Match, RadixTree, common_tokens
from .relief import Relief
from .sequence import NO_PAGES, Phase, Rows, Sequence, trimmed
from .speculation import Speculator
from .table import Chunk, RunningTable, StepPlan
from .tiers.base import PrefixTier

_NO_MATCH = Match(NO_PAGES, -1, 0, 0)
_PREFILLS = 8  # so many may be under way at a time, or as many as fill the step


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start."""

    preemptions: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    queried_tokens: int = 0  # of prompts that were looked up in the prefix tree


class Scheduler:
    """Waiting sequences, running ones by rank, and the pages between them. For one thread."""

    def __init__(
        self,
        *,
        pool: KVPool,
        allocator: PageAllocator,
        tree: RadixTree,
        tier: PrefixTier,
        table: RunningTable,
        options: EngineOptions,
        speculator: Speculator | None = None,
    ) -> None:
        self.waiting = FairQueue()
        self.running: list[Sequence] = []
        self.counts = SchedulerCounts()
        self.relief = Relief(rows=options.step_tokens, running=options.max_running)
        self.admitting: Sequence | None = None  # who is to blame if `schedule` raises
        self._pool = pool
        self._allocator = allocator
        self._tree = tree
        self._tier = tier
        self._table = table
        self._options = options
        self._speculator = speculator
        self._pace = Pace(stall=options.stall, least=options.least_prefill, most=options.step_tokens)

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self) -> StepPlan:
        """Choose the next step's rows. Every chosen row has its page; reused spans and copied pages are written."""
        self._charge()
        self._yield_to_priority()
        plan = StepPlan()
        for sequence in list(self.running):
            if sequence.phase is Phase.DECODE and self._grow(sequence):
                plan.decodes.append(sequence)
        budget = self._prefill_rows(len(plan.decodes))
        fetching = self._admit_in_turn(budget)
        prefills = self._prefills()
        given = zip(prefills, shares(prefills, budget), strict=True)
        plan.chunks = [_chunk(sequence, count) for sequence, count in given if count]
        idle = not (plan.sequences or self.running or fetching)
        assert not (idle and self.waiting), "a waiting request does not fit into an idle engine"
        if self._allocator.free < self._tier.headroom:
            self._evict(1)
        if not plan.chunks:  # with a prefill, a step is bound by its products
            plan.drafts = self._backed(plan.decodes, self._guessed(plan.decodes))
        return plan

    def _prefill_rows(self, decodes: int) -> int:
        rows = min(self._options.step_tokens - decodes, self._pace.rows(decodes), self.relief.rows)
        return max(0, rows)

    def ran(self, plan: StepPlan, *, seconds: float) -> None:
        """Learn from a step that has run and whose tokens are taken in."""
        # Only what was not reached before is progress: a last chunk that never fits must not be tried for ever.
        further = self.relief.failures == 0 or any(
            sequence.phase is Phase.DONE or sequence.computed > sequence.furthest for sequence in plan.sequences
        )
        self.relief.ran(further=further)
        self._pace.ran(decodes=len(plan.decodes), rows=sum(chunk.count for chunk in plan.chunks), seconds=seconds)

    def relieve(self, plan: StepPlan | None) -> bool:
        """After a step without memory: all that it ran waits again, and less runs from now on.

        False if nothing can be made smaller. `plan` is None if it was scheduling that failed.
        """
        rows = sum(chunk.count for chunk in plan.chunks) if plan else 0
        if not self.relief.shrink(rows=rows, running=len(self.running), guessed=bool(plan and plan.drafts)):
            return False
        again = plan.sequences if plan else [self.admitting] if self.admitting else []
        self.admitting = None
        for sequence in again:
            if sequence in self.running:  # nothing of the failed step is shared: what it loaded may be incomplete
                sequence.furthest = max(sequence.furthest, sequence.computed)
                self._requeue(sequence)
        return True

    @property
    def _full(self) -> bool:
        return self._table.full or len(self.running) >= self.relief.running

    def _admit_in_turn(self, budget: int) -> bool:
        """Admit whose turn it is until there are prefills enough. Who finds no room holds up all after it.

        Returns whether anybody was passed over who waits for a slow tier.
        """
        fetching = False
        if budget <= 0:
            return fetching
        for sequence in self.waiting.in_turn():
            begun = self._prefills()
            if len(begun) >= _PREFILLS and sum(other.remaining for other in begun) >= budget:
                return fetching
            if self._follows(sequence):
                continue
            if self._fetches(sequence):
                fetching = True
                continue
            self.admitting = sequence
            admitted = self._admit(sequence)
            self.admitting = None
            if not admitted:
                break
        return fetching

    def _prefills(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.phase is Phase.PREFILL]

    def _charge(self) -> None:
        """Tell the queue what the running ones were given; only who waits needs to know."""
        if self.waiting:
            for sequence in self.running:
                self.waiting.charge(sequence)

    def run_ahead(self, sequences: list[Sequence]) -> bool:
        """Whether `sequences` can run one more step before their newest tokens are known; then takes the pages for it.

        So it is if nobody else runs, nobody who waits can be admitted, there is nothing worth guessing, none of them
        ends by its length, and there are pages that no running one holds: a tree that has grown into the whole pool is
        the usual state.
        One that ends otherwise has run in vain: what it wrote lies behind all that anybody knows of.
        """
        if len(self.running) != len(sequences) or not self._stuck() or self._guessed(sequences):
            return False
        if any(sequence.length + 1 >= sequence.most for sequence in sequences):
            return False
        size = self._pool.page_size
        short = [sequence for sequence in sequences if len(sequence.pages) * size < sequence.length + 1]
        self._evict(len(short) - self._allocator.free)
        if self._allocator.free < len(short):
            return False
        for sequence in short:
            self._extend(sequence)
        return True

    def _stuck(self) -> bool:
        """Whether nobody who waits can be admitted before somebody who runs ends."""
        if not self.waiting:
            return True
        self._charge()
        if self.waiting.priority > self.running[-1].priority:
            return False
        if self._full:
            return True
        first = next((each for each in self.waiting.in_turn() if not self._fetches(each)), None)
        return first is None or self._placed(first) is None

    def _extend(self, sequence: Sequence, pages: int = 1) -> None:
        fresh = self._allocator.alloc(pages, after=int(sequence.pages[-1]))
        self._tier.claim(fresh)
        self._table.set_pages(sequence, np.concatenate((sequence.pages, fresh)))

    def _guessed(self, sequences: list[Sequence]) -> list[Rows]:
        if self._speculator is None or not self.relief.guessing:
            return []
        return self._speculator.drafts(sequences, room=self._options.step_tokens - len(sequences))

    def _backed(self, sequences: list[Sequence], drafts: list[Rows]) -> list[Rows]:
        """As much of the drafts as there are pages for: only free ones are taken, and nobody loses any."""
        backed = []
        for sequence, draft in zip(sequences, drafts, strict=False):
            size = self._pool.page_size
            missing = -(-(sequence.length + len(draft)) // size) - len(sequence.pages)
            taken = min(missing, self._allocator.free)
            if taken > 0:
                self._extend(sequence, taken)
            backed.append(draft[: len(sequence.pages) * size - sequence.length])
        return backed if any(map(len, backed)) else []

    def settle(self, sequence: Sequence) -> None:
        """Give back the pages that a draft was given and its accepted tokens do not need."""
        keep = -(-sequence.length // self._pool.page_size)
        if sequence.phase is Phase.DECODE and len(sequence.pages) > keep:
            self._allocator.unref(sequence.pages[keep:])
            self._table.set_pages(sequence, sequence.pages[:keep])

    def advance(self, chunk: Chunk) -> None:
        """Note that a chunk has run; what it computed may be shared from now on."""
        sequence = chunk.sequence
        sequence.ran += chunk.count
        sequence.recomputed += chunk.quota
        if chunk.probed:  # what stands before the first span is as it should be
            sequence.computed = sequence.spans[0].start
            self._share(sequence)
            sequence.choose(first=sequence.computed)
            return
        sequence.computed = sequence.length if chunk.last else int(sequence.plan[sequence.ran])
        self._share(sequence)
        if chunk.last:
            sequence.phase = Phase.DECODE

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever phase; its KV goes to the prefix tree."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is not Phase.DONE:
            self._share(sequence, tail=True)
            self._release(sequence)
        sequence.stop(Phase.DONE)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out whose last step or admission failed: nothing that it computed since is kept."""
        if sequence is self.admitting:
            self.admitting = None
        if sequence in self.running:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.stop(Phase.DONE)

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the newest token's KV; False if this cost the sequence its own place."""
        if len(sequence.pages) * self._pool.page_size >= sequence.length:
            return True
        while not self._allocator.free and not self._evict(1):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._extend(sequence)
        return True

    def _follows(self, sequence: Sequence) -> bool:
        """Whether to wait for a running sequence that is computing a prefix of this one."""
        if not sequence.shares:
            return False
        if sequence.leader is not None:
            leader, shared = sequence.leader
            if leader.phase is Phase.PREFILL and leader.computed < shared:
                return True
            sequence.leader = None
        for leader in self.running:
            shared = self._shared_prefix(sequence, leader)
            if shared - leader.computed < self._options.shared_tokens:
                continue
            if shared - self._match(sequence).tokens >= self._options.shared_tokens:
                sequence.leader = leader, shared
                return True
        return False

    def _shared_prefix(self, sequence: Sequence, leader: Sequence) -> int:
        """How many tokens of a sequence a prefilling one will have put into the prefix tree when it is done."""
        namespaces = sequence.request.namespace, leader.request.namespace
        if leader.phase is not Phase.PREFILL or not leader.shares or namespaces[0] != namespaces[1]:
            return 0
        common = min(common_tokens(sequence.ids[:-1], leader.ids), leader.limit)
        return common // self._pool.page_size * self._pool.page_size

    def _evict(self, wanted: int) -> int:
        """Have the prefix tree free `wanted` pages, and some more where a batch costs a tier no more than a few."""
        return self._tree.evict(max(wanted, self._tier.batch)) if wanted > 0 else 0

    def _names(self, sequence: Sequence) -> list[bytes]:
        """The names of all whole pages that may be loaded: all but the last token's."""
        naming, names = self._tier.naming, sequence.names
        if naming is None or not sequence.shares:
            return []
        size = self._pool.page_size
        whole = (sequence.length - 1) // size
        if len(names) < whole:
            before = names[-1] if names else naming.start(sequence.request.namespace)
            names += naming.extend(before, sequence.ids[len(names) * size : whole * size])
        return names[:whole]

    def _fetches(self, sequence: Sequence) -> bool:
        """Whether to wait for what a slow tier has of this one's prompt; it is asked once."""
        if sequence.fetch is None:
            names = self._names(sequence)
            known = len(self._match(sequence).pages) if names else 0
            sequence.fetch = self._tier.fetch(names[known:])
        return not sequence.fetch.done

    def _match(self, sequence: Sequence) -> Match:
        if not sequence.shares:
            return _NO_MATCH
        return self._tree.match(sequence.ids[:-1], namespace=sequence.request.namespace)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a row and pages for all its tokens; False if there is no room now."""
        match = None if self._full else self._placed(sequence)
        if match is None:
            return False
        size, first = self._pool.page_size, len(match.pages)
        stored = self._names(sequence)[first:]
        stored = stored[: self._tier.match(stored)]
        if stored:  # the page that partly matches is among them
            match = Match(match.pages, -1, 0, first * size)
        self.waiting.take(sequence)
        self._table.enter(sequence)
        insort(self.running, sequence, key=lambda other: other.rank)
        self._take_pages(sequence, match)
        loading = self._tier.load(stored, sequence.pages[first : first + len(stored)]) * size
        cached = match.tokens + loading
        if sequence.admitted is None:
            sequence.admitted = time.monotonic()
            sequence.cached = min(cached, sequence.prompt)
            sequence.loaded = loading
            self.counts.cached_tokens += sequence.cached
            self.counts.queried_tokens += sequence.prompt if sequence.shares else 0
        sequence.cached = min(sequence.cached, cached)  # what was evicted meanwhile is computed after all
        self.counts.loaded_tokens += loading
        reuse = sequence.request.reuse
        sequence.start(cached, trimmed(reuse.spans, cached) if reuse else (), loading=loading)
        self.waiting.charge(sequence)
        for span in sequence.spans:
            self._pool.write_block(self._table.slots(sequence, span.start, span.stop), span.kv)
        return True

    def _placed(self, sequence: Sequence) -> Match | None:
        """The prefix hit with which there are pages for a sequence now."""
        match = self._match(sequence)
        if match.partial >= 0 and not self._fits(sequence, match):
            match = Match(match.pages, -1, 0, len(match.pages) * self._pool.page_size)
        return match if self._fits(sequence, match) else None

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether there are pages for a sequence, and one more for each running one to grow into."""
        unused = int(np.count_nonzero(self._allocator.refs(_held(match)) == 1))
        available = self._allocator.free + self._tree.evictable - unused
        return available >= self._missing(sequence, match) + len(self.running)

    def _missing(self, sequence: Sequence, match: Match) -> int:
        return -(-sequence.length // self._pool.page_size) - len(match.pages)

    def _take_pages(self, sequence: Sequence, match: Match) -> None:
        """Share a match's whole pages, copy the partly matching one, and take fresh ones for the rest."""
        held, missing = _held(match), self._missing(sequence, match)
        self._allocator.ref(held)
        self._evict(missing - self._allocator.free)
        fresh = self._allocator.alloc(missing, after=int(match.pages[-1]) if len(match.pages) else -1)
        self._tier.claim(fresh)
        self._table.set_pages(sequence, np.concatenate((match.pages, fresh)))  # from here on `discard` knows them
        if match.partial >= 0:
            places = torch.arange(match.partial_tokens, device=self._pool.data.device)
            size = self._pool.page_size
            try:
                self._pool.copy(match.partial * size + places, int(fresh[0]) * size + places)
            finally:
                self._allocator.unref(held[-1:])

    def _yield_to_priority(self) -> None:
        """Preempt what is running for a waiting request of a higher priority that has no room."""
        while self.waiting and self.running:
            first, last = self.waiting.first, self.running[-1]
            if first.priority <= last.priority:
                return
            if self._follows(first) or self._fetches(first):
                return
            if not self._full and self._placed(first) is not None:
                return
            self._preempt(last)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the waiting ones; the prompt and what was generated are computed anew, as far as they get evicted."""
        self._share(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.stop(Phase.WAITING)
        self.add(sequence)
        self.counts.preemptions += 1

    def _share(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Give the prefix tree what it may know of a sequence's KV."""
        known = sequence.storable
        if known:
            namespace = sequence.request.namespace
            pages = self._tree.insert(sequence.ids[:known], sequence.pages, namespace=namespace, tail=tail)
            self._table.set_pages(sequence, pages)

    def _release(self, sequence: Sequence) -> None:
        self.waiting.charge(sequence)
        self._allocator.unref(sequence.pages)
        self._table.leave(sequence)
        self.running.remove(sequence)


def _held(match: Match) -> Pages:
    return match.pages if match.partial < 0 else np.append(match.pages, np.int32(match.partial))


def _chunk(sequence: Sequence, budget: int) -> Chunk:
    count = min(budget, len(sequence.plan) - sequence.ran)
    chunk = Chunk(sequence=sequence, first=sequence.ran, count=count)
    if sequence.ran + count == len(sequence.plan):
        chunk = replace(chunk, last=not sequence.probing, probed=sequence.probing)
    if sequence.repairable is None:
        return chunk
    repairable = int(np.count_nonzero(sequence.repairable[sequence.ran : sequence.ran + count]))
    quota = sequence.quota(count)
    return replace(chunk, quota=quota, narrowed=quota < repairable)
