"""The engine without its thread: requests in, tokens out, one step at a time. `step` is schedule, run, postprocess."""

import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import islice

import numpy as np
import torch

from ..prompt.errors import BadRequest, Overloaded, PromptsluiceError
from .checks import check_request
from .drawing import Drawer
from .grammar.compiler import GrammarCompiler
from .grammar.filling import Masks
from .kept_blends import KeptBlends
from .loader import LoadedModel
from .model import Joints
from .options import EngineOptions
from .outputs import Outputs, detokenizer
from .pages import PageAllocator
from .plan import StepPlan
from .pool import KVPool
from .radix import RadixTree
from .readings import Readings
from .relief import release_memory
from .rounded_kv import pool_dtype
from .runner import Flight, StepRunner
from .scheduler import Scheduler
from .sequence import Phase, Sequence, Sink, telling_rows
from .sequence_pages import SequencePages
from .span_loads import SpanLoader, span_loader
from .speculation import speculator
from .stats import EngineStats
from .step_cost import StepCost
from .steps import MixedSteps, SingleRowSteps
from .table import RunningTable
from .tiers.open import open_tiers
from .tiers.streams import SideStream
from .types import GenerationRequest
from .warm_up import warm_up

# How long a step waits for the disk while nothing can run: whoever comes meanwhile waits with it.
_LONGEST_PAUSE_S = 0.005


class Engine:
    """Runs requests on a model. All methods but `prepare` belong to one thread; `grammars` may be used from any."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        options: EngineOptions | None = None,
        single_rows: Callable[..., SingleRowSteps] | None = None,
        mixed: Callable[..., MixedSteps] | None = None,
        joints: Joints | None = None,
        side_stream: SideStream | None = None,
        step_cost: StepCost | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`single_rows` makes what runs steps of one row a request, `mixed` what runs others, and `joints` are the
        decoder's for steps that neither serves: by default CUDA graphs, on a GPU, the last two of as many rows as the
        options say.

        `side_stream` is where pages and reused spans are copied to and from host memory: by default CUDA streams, on a
        GPU. `step_cost` decides how many tokens are guessed; by default it is measured now, if any may be.
        `clock` (seconds) times the steps.
        """
        self.model = model
        self.options = options = options or EngineOptions()
        decoder, spec = model.decoder, model.spec
        kv_dtype = pool_dtype(options.kv_dtype, decoder.dtype, decoder.device)
        guessed = options.guessed(decoder.device.type)
        page_bytes = KVPool.bytes_per_token(spec, kv_dtype) * options.page_size
        pages = options.pages or max(2, options.kv_bytes // page_bytes)
        # The page after the last is nobody's: rows that only pad a batch write there.
        self.pool = KVPool(
            spec, pages=pages + 1, page_size=options.page_size,
            dtype=kv_dtype, wide=decoder.dtype, device=decoder.device,
        )  # fmt: skip
        self.allocator = PageAllocator(pages)
        self.tier = open_tiers(options, self.pool, spec, fingerprint=model.fingerprint, stream=side_stream)
        self.tree = RadixTree(
            self.allocator, page_size=options.page_size, naming=self.tier.naming, evicted=self.tier.put
        )
        self.kept = KeptBlends(page_size=options.page_size)
        self.max_tokens = min(spec.max_context, pages * options.page_size)
        self._table = RunningTable(
            rows=options.max_running,
            width=math.ceil(self.max_tokens / options.page_size),
            page_size=options.page_size,
            device=decoder.device,
        )
        drawer = Drawer(counts=self._table.counts, eos_ids=spec.eos_ids)
        on_card, graph_rows = decoder.device.type == "cuda", options.graph_rows
        if on_card and single_rows is None:
            from .graphs import DecodeGraphs as single_rows
        if on_card and graph_rows and mixed is None:
            from .mixed_graphs import MixedGraphs as mixed
        if on_card and graph_rows and joints is None:
            from .joint_graphs import JointGraphs

            joints = JointGraphs(decoder, most=graph_rows)
        steps: SingleRowSteps | None = None
        mixed_steps: MixedSteps | None = None
        if single_rows is not None or mixed is not None:
            mirror = self._table.mirror(spare=pages)
            if single_rows is not None:
                steps = single_rows(
                    decoder, self.pool, mirror,
                    sampling=self._table.sampling, max_tokens=self.max_tokens,
                )  # fmt: skip
            if mixed is not None:
                mixed_steps = mixed(decoder, self.pool, mirror, most=graph_rows, max_tokens=self.max_tokens)
        spans = span_loader(decoder, self.pool, side_stream)
        if on_card and isinstance(spans, SpanLoader):
            warm_up(decoder, self.pool, spans, spare=pages, max_tokens=self.max_tokens)
        self._pages = SequencePages(
            pool=self.pool,
            allocator=self.allocator,
            tree=self.tree,
            kept=self.kept,
            tier=self.tier,
            spans=spans,
            table=self._table,
        )
        self._scheduler = Scheduler(
            pages=self._pages,
            allocator=self.allocator,
            tier=self.tier,
            table=self._table,
            options=options,
            speculator=speculator(decoder, steps, mixed_steps, most=guessed, spare=options.max_running, cost=step_cost),
        )
        self._runner = StepRunner(
            decoder=decoder,
            pool=self.pool,
            table=self._table,
            loads=self._pages.loads,
            carry=self._pages.carry,
            drawer=drawer,
            masks=Masks(rows=options.step_tokens, vocab=spec.vocab, device=decoder.device),
            steps=steps,
            mixed=mixed_steps,
            joints=joints,
        )
        self._outputs = Outputs(spec, scheduler=self._scheduler, table=self._table, drawer=drawer, tier=self.tier)
        self.grammars = GrammarCompiler(model.tokenizer, vocab=spec.vocab, eos_ids=spec.eos_ids)
        self._arrivals = 0
        self._plan: StepPlan | None = None
        self._flight: Flight | None = None
        self._clock = clock
        self._began = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def waiting(self) -> list[Sequence]:
        """By arrival."""
        return list(self._scheduler.waiting)

    @property
    def sequences(self) -> list[Sequence]:
        """All that is waiting or running."""
        return [*self._scheduler.running, *self._scheduler.waiting]

    def prepare(self, request: GenerationRequest, sink: Sink) -> Sequence:
        """Check a request and make its state; from any thread. Raises BadRequest or ContextTooLong."""
        tokens = np.fromiter(request.ids, np.int64, len(request.ids))
        check_request(request, tokens, self.model, room=self.max_tokens)
        if request.grammar is not None and request.grammar.compiler is not self.grammars:
            raise BadRequest("the grammar was compiled for another engine", param="response_format")
        params, prompt = request.sampling, len(request.ids)
        most = self.max_tokens if params.max_tokens is None else min(self.max_tokens, prompt + params.max_tokens)
        tokenizer = self.model.tokenizer
        return Sequence(
            request=request,
            sink=sink,
            tokens=tokens,
            prompt=prompt,
            most=most,
            length=prompt,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            detokenizer=detokenizer(tokenizer, request) if tokenizer and most > prompt else None,
            logprobs=torch.full((max(0, prompt - 1),), math.nan) if request.prompt_logprobs else None,
            telling=telling_rows(request),
            matcher=request.grammar.matcher() if request.grammar else None,
        )

    def add(self, request: GenerationRequest, sink: Sink) -> Sequence:
        """`prepare` and `enqueue`; returns the handle for `abort`."""
        sequence = self.prepare(request, sink)
        self.enqueue(sequence)
        return sequence

    def enqueue(self, sequence: Sequence) -> None:
        self._arrivals += 1
        sequence.order = self._arrivals
        self._scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a request wherever it is; its sink gets what was held back and the reason `abort`."""
        if sequence.phase is not Phase.DONE:
            self._outputs.finish(sequence, "abort")

    @torch.inference_mode()
    def step(self) -> None:
        """Run one step of all that can run. On an exception, call `fail`, or `relieve` if the device had no memory."""
        self._began = self._clock()
        flight, self._flight = self._flight, None
        if flight is not None and any(sequence.phase is Phase.DECODE for sequence in flight.sequences):
            self._land(flight, StepPlan(decodes=flight.sequences))
            return
        self._plan = None
        plan = self._plan = self._scheduler.schedule()
        if self._runner.overlaps(plan):
            self._land(self._runner.launch(plan), plan)
        elif plan.sequences:
            tokens = self._runner.run(plan)
            seconds = self._account(plan)
            self._advance(plan)
            self._take(plan, tokens, seconds)
        elif self._scheduler.waiting:  # for a slow tier, all of them
            self.tier.wait(_LONGEST_PAUSE_S)
        self._plan = None

    def _land(self, flight: Flight, plan: StepPlan) -> None:
        """Take a launched step's tokens in, while the device already runs the next one if nothing can change for it."""
        self._plan = plan
        flight = self._runner.draw(flight)
        if self._scheduler.run_ahead(flight.sequences):
            self._flight = self._runner.again(flight)
        self._advance(plan)  # while the device is at it
        tokens = self._runner.ids(flight)
        self._take(plan, tokens, self._account(plan))
        self._plan = None
        if not self._scheduler.running:
            self._flight = None  # all have ended: nobody is left to land for

    def _advance(self, plan: StepPlan) -> None:
        """Note which prompts' rows have run, or have been launched: the device runs them before what comes later, or
        fails for good."""
        for chunk in plan.chunks:
            self._scheduler.advance(chunk)
            if chunk.last:
                self._prefilled(chunk.sequence)

    def _account(self, plan: StepPlan) -> float:
        """The seconds that the step took, of which each prefill is given its part."""
        seconds = self._clock() - self._began
        plan.account(seconds)
        return seconds

    def _take(self, plan: StepPlan, tokens: list[int], seconds: float) -> None:
        self._outputs.totals["steps"] += 1
        drawn = iter(tokens)
        for sequence, draft in zip(plan.drawing, plan.guesses, strict=True):
            self._outputs.take(sequence, draft.tolist(), list(islice(drawn, 1 + len(draft))))
            if len(draft):
                self._pages.settle(sequence)
        if plan.drafts:  # after these the device waits till their tokens are out
            seconds = self._clock() - self._began
        self._scheduler.ran(plan, seconds=seconds)

    def _prefilled(self, sequence: Sequence) -> None:
        if sequence.request.keep_kv and sequence.kv is None:
            sequence.kv = self.pool.read(self._table.slots(sequence, 0, sequence.prompt))
        if not sequence.generates:
            self._outputs.finish(sequence, "length")

    def refuse(self, sequence: Sequence, error: PromptsluiceError) -> None:
        """End a request that waits, with `error`."""
        assert sequence.phase is Phase.WAITING, sequence.phase
        self._outputs.give_up(sequence, error)

    def fail(self, error: PromptsluiceError) -> None:
        """After a step that raised: give up the requests that it ran, with `error`, and free all they held."""
        scheduler = self._scheduler
        if self._plan:
            affected = self._plan.sequences
        elif scheduler.admitting is not None:
            affected = [scheduler.admitting]
        else:  # scheduling failed otherwise: what runs, or what could not be admitted, is to blame
            affected = scheduler.running or list(scheduler.waiting)[:1]
        self._plan = self._flight = None
        self._pages.settle_loads()  # their pages are others' from here on
        for sequence in list(affected):
            if sequence.phase is not Phase.DONE:
                self._outputs.give_up(sequence, error)

    def relieve(self) -> None:
        """After a step for which the device had no memory: make steps smaller and try the same requests again.

        What cannot be made smaller fails with Overloaded.
        """
        self._pages.settle_loads()  # into pages that may be given to others now
        release_memory(self.model.decoder.device)
        if self._scheduler.relieve(self._plan):
            self._plan = self._flight = None
            return
        self.fail(Overloaded("the device has no memory for this request now", retry_after=10))

    def readings(self, stats: EngineStats) -> Readings:
        """For monitoring, from any thread: `stats` and all that is not worth counting in every step."""
        unused = self.allocator.free + self.tree.evictable
        return Readings(
            stats=stats, latencies=self._outputs.latencies, kv_usage=max(0.0, 1 - unused / self.allocator.pages)
        )

    def stats(self) -> EngineStats:
        totals = self._outputs.totals
        return EngineStats(
            waiting=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
            pages_total=self.allocator.pages,
            pages_free=self.allocator.free,
            pages_cached=self.tree.pages,
            steps=totals["steps"],
            preemptions=self._scheduler.counts.preemptions,
            finished=totals["finished"],
            prompt_tokens=totals["prompt"],
            cached_tokens=self._scheduler.counts.cached_tokens,
            loaded_tokens=self._scheduler.counts.loaded_tokens,
            blended_tokens=self._scheduler.counts.blended_tokens,
            queried_tokens=self._scheduler.counts.queried_tokens,
            reused_tokens=totals["reused"],
            recomputed_tokens=totals["recomputed"],
            generated_tokens=totals["generated"],
            drafted_tokens=totals["drafted"],
            accepted_tokens=totals["accepted"],
            **asdict(self.tier.stats()),
            out_of_memory=self._scheduler.relief.times,
        )

    def close(self) -> None:
        """End what works in the background; nothing may run afterwards."""
        device = self.model.decoder.device
        if device.type == "cuda":  # a step that ran ahead writes its ids to memory that ends with this engine
            with suppress(RuntimeError):  # a device that is lost runs nothing any more
                torch.cuda.synchronize(device)
        self.tier.close()
