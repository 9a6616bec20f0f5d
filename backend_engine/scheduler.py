"""What runs in the next step: decodes first, then chunks of prefills, under one budget of rows.

It also decides every move of pages: admission (prefix hit, copy-on-write, reused spans), growth, preemption by
recompute, release.
"""

import time
from bisect import insort

from .fair_queue import FairQueue
from .options import EngineOptions
from .pace import Pace
from .pages import PageAllocator
from .plan import Chunk, StepPlan, next_chunk
from .prefill_shares import shares
from .radix import Match
from .relief import Relief
from .sequence import Phase, Rows, Sequence, trimmed
from .sequence_pages import SequencePages
from .speculation import Speculator
from .stats import SchedulerCounts
from .table import RunningTable
from .tiers.base import PrefixTier

_PREFILLS = 8  # so many may be under way at a time, or as many as fill the step


class Scheduler:
    """Waiting sequences, running ones by rank, and the pages between them. For one thread."""

    def __init__(
        self,
        *,
        pages: SequencePages,
        allocator: PageAllocator,
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
        self._pages = pages
        self._allocator = allocator
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
        plan.chunks = [next_chunk(sequence, count) for sequence, count in given if count]
        idle = not (plan.sequences or self.running or fetching)
        assert not (idle and self.waiting), "a waiting request does not fit into an idle engine"
        if self._allocator.free < self._tier.headroom:
            self._pages.evict(1)
        asked = self._pace.asks(len(plan.decodes)) and bool(self.waiting or prefills)
        if not plan.chunks and not asked:  # with a prefill, a step is bound by its products
            plan.drafts = self._pages.backed(plan.decodes, self._guessed(plan.decodes))
        return plan

    def _prefill_rows(self, decodes: int) -> int:
        rows = min(self._options.step_tokens - decodes, self._pace.rows(decodes), self.relief.rows)
        if len(self.running) + len(self.waiting) == 1 and (*self.running, *self.waiting)[0].request.idle:
            rows = min(rows, self._options.least_prefill)  # who comes meanwhile waits for this step
        return max(0, rows)

    def ran(self, plan: StepPlan, *, seconds: float) -> None:
        """Learn from a step that has run and whose tokens are taken in."""
        # Only what was not reached before is progress: a last chunk that never fits must not be tried for ever.
        further = self.relief.failures == 0 or any(
            sequence.phase is Phase.DONE or sequence.computed > sequence.furthest for sequence in plan.sequences
        )
        self.relief.ran(further=further)
        if not plan.drafts:  # the aim is what a stream's next token takes without guesses
            rows = sum(chunk.count for chunk in plan.chunks)
            self._pace.ran(decodes=len(plan.decodes), rows=rows, seconds=seconds)
        elif self._speculator is not None:
            self._speculator.ran(rows=plan.rows, seconds=seconds)

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
            if sequence in self.running:  # nothing more is shared: what the failed step loaded may be incomplete
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
            if self._pages.fetches(sequence):
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
        ends by its length or has to be drawn by the host, and there are pages that no running one holds: a tree that
        has grown into the whole pool is the usual state.
        One that ends otherwise has run in vain: what it wrote lies behind all that anybody knows of.
        """
        if len(self.running) != len(sequences) or not self._stuck() or self._guessed(sequences):
            return False
        if any(sequence.undecided or sequence.length + 1 >= sequence.most for sequence in sequences):
            return False
        short = [sequence for sequence in sequences if self._pages.short(sequence, ahead=1)]
        self._pages.evict(len(short) - self._allocator.free)
        if self._allocator.free < len(short):
            return False
        for sequence in short:
            self._pages.extend(sequence)
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
        first = next((each for each in self.waiting.in_turn() if not self._pages.fetches(each)), None)
        return first is None or self._placed(first) is None

    def _guessed(self, sequences: list[Sequence]) -> list[Rows]:
        if self._speculator is None or not self.relief.guessing:
            return []
        return self._speculator.drafts(sequences, room=self._options.step_tokens - len(sequences))

    def advance(self, chunk: Chunk) -> None:
        """Note that a chunk has run; what it computed may be shared from now on."""
        sequence = chunk.sequence
        sequence.ran += chunk.count
        sequence.recomputed += chunk.quota
        if sequence.glances < 1:
            sequence.computed = sequence.begun
            self._pages.share(sequence)
            if chunk.probed:
                sequence.choose(first=sequence.begun)
            return
        if chunk.probed:  # what stands before the first span is as it should be
            sequence.computed = sequence.spans[0].start
            self._pages.share(sequence)
            sequence.choose(first=sequence.computed)
            return
        sequence.computed = sequence.length if chunk.last else int(sequence.plan[sequence.ran])
        if chunk.last:
            self._pages.keep(sequence)
        self._pages.share(sequence, grows=chunk.first > 0)
        if chunk.last:
            sequence.phase = Phase.DECODE

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, in whatever phase; its KV goes to the prefix tree."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is not Phase.DONE:
            self._pages.share(sequence, tail=True)
            self._release(sequence)
        sequence.stop(Phase.DONE)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out whose last step or admission failed: nothing that it computed since `advance` is kept."""
        if sequence is self.admitting:
            self.admitting = None
        if sequence in self.running:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.stop(Phase.DONE)

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the newest token's KV; False if this cost the sequence its own place."""
        if not self._pages.short(sequence):
            return True
        while not self._allocator.free and not self._pages.evict(1):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._pages.extend(sequence)
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
            shared = self._pages.shared_prefix(sequence, leader)
            if shared - leader.computed < self._options.shared_tokens:
                continue
            if shared - self._pages.match(sequence).tokens >= self._options.shared_tokens:
                sequence.leader = leader, shared
                return True
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a row and pages for all its tokens; False if there is no room now."""
        match = None if self._full else self._placed(sequence)
        if match is None:
            return False
        stored = self._pages.stored(sequence, match)
        if stored:  # the page that partly matches is among them
            match = self._pages.whole(match)
        self.waiting.take(sequence)
        self._table.enter(sequence)
        insort(self.running, sequence, key=lambda other: other.rank)
        self._pages.take(sequence, match)
        loading = self._pages.load(sequence, stored, first=len(match.pages))
        cached = match.tokens + loading
        if sequence.admitted is None:
            sequence.admitted = time.monotonic()
            sequence.cached = min(cached, sequence.prompt)
            sequence.loaded = loading
            sequence.blended = 0 if sequence.kept is None else max(0, sequence.cached - sequence.kept.exact)
            self.counts.blended_tokens += sequence.blended
            self.counts.cached_tokens += sequence.cached
            self.counts.queried_tokens += sequence.prompt if sequence.shares else 0
        sequence.cached = min(sequence.cached, cached)  # what was evicted meanwhile is computed after all
        self.counts.loaded_tokens += loading
        reuse = sequence.request.reuse
        sequence.start(cached, trimmed(reuse.spans, cached) if reuse else (), loading=loading)
        self.waiting.charge(sequence)
        self._pages.write_spans(sequence)
        return True

    def _placed(self, sequence: Sequence) -> Match | None:
        """The prefix hit with which there are pages for a sequence now, and one for each running one to grow into."""
        return self._pages.placed(sequence, spare=len(self.running))

    def _yield_to_priority(self) -> None:
        """Preempt what is running for a waiting request of a higher priority that has no room."""
        while self.waiting and self.running:
            first, last = self.waiting.first, self.running[-1]
            if first.priority <= last.priority:
                return
            if self._follows(first) or self._pages.fetches(first):
                return
            if not self._full and self._placed(first) is not None:
                return
            self._preempt(last)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the waiting ones; the prompt and what was generated are computed anew, as far as they get evicted."""
        self._pages.share(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.stop(Phase.WAITING)
        self.add(sequence)
        self.counts.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.waiting.charge(sequence)
        self._pages.release(sequence)
        self._table.leave(sequence)
        self.running.remove(sequence)
