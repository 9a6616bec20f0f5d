"""The engine without its thread: requests in, tokens out, one step at a time. `step` is schedule, run, postprocess."""

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ..prompt.errors import BadRequest, Overloaded, PromptsluiceError
from .checks import check_request
from .detokenize import Detokenizer, TextDecoder
from .drawing import Drawer, token_logprobs
from .grammar.compiler import GrammarCompiler
from .grammar.filling import Masks
from .loader import LoadedModel
from .options import EngineOptions
from .pages import PageAllocator
from .pool import KVPool
from .radix import RadixTree
from .readings import Latencies, Readings
from .relief import release_memory
from .scheduler import Scheduler
from .sequence import Phase, Sequence, Sink
from .speculation import speculator
from .stats import EngineStats
from .step_cost import StepCost
from .steps import Launched, SingleRowSteps
from .table import Chunk, RunningTable, StepPlan
from .tiers.open import open_tiers
from .tiers.streams import SideStream
from .types import Delta, FinishReason, GenerationRequest, Result, TokenLogprobs

logger = logging.getLogger(__name__)

# Rows whose logits over the whole vocabulary are in memory at a time when prompts are scored.
SCORED_ROWS = 64
# Ids of the prompt that a text which goes on from it is decoded behind: a character has up to four bytes.
_DECODED_BEHIND = 8
# How long a step waits for the disk while nothing can run: whoever comes meanwhile waits with it.
_LONGEST_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A step that the device runs for `sequences`, one row each, while the host is busy with the one before."""

    graphs: SingleRowSteps
    sequences: list[Sequence]
    launched: Launched


class Engine:
    """Runs requests on a model. All methods but `prepare` belong to one thread; `grammars` may be used from any."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        options: EngineOptions | None = None,
        single_rows: Callable[..., SingleRowSteps] | None = None,
        side_stream: SideStream | None = None,
        step_cost: StepCost | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`single_rows` makes what runs steps of one row a request: by default CUDA graphs, on a GPU.

        `side_stream` is where pages are copied to and from host memory: by default a CUDA stream, on a GPU.
        `step_cost` decides how many tokens are guessed; by default it is measured now, if any may be.
        `clock` (seconds) times the steps.
        """
        self.model = model
        self.options = options = options or EngineOptions()
        decoder, spec = model.decoder, model.spec
        page_bytes = KVPool.bytes_per_token(spec, decoder.dtype) * options.page_size
        pages = options.pages or max(2, options.kv_bytes // page_bytes)
        # The page after the last is nobody's: rows that only pad a batch write there.
        self.pool = KVPool(
            spec, pages=pages + 1, page_size=options.page_size, dtype=decoder.dtype, device=decoder.device
        )
        self.allocator = PageAllocator(pages)
        self.tier = open_tiers(options, self.pool, spec, fingerprint=model.fingerprint, stream=side_stream)
        self.tree = RadixTree(
            self.allocator, page_size=options.page_size, naming=self.tier.naming, evicted=self.tier.put
        )
        self.max_tokens = min(spec.max_context, pages * options.page_size)
        self._table = RunningTable(
            rows=options.max_running,
            width=math.ceil(self.max_tokens / options.page_size),
            page_size=options.page_size,
            device=decoder.device,
        )
        self._drawer = Drawer(counts=self._table.counts, eos_ids=spec.eos_ids)
        guessed = options.guessed(decoder.device.type)
        self._graphs: SingleRowSteps | None = None
        if single_rows is None and decoder.device.type == "cuda":
            from .graphs import DecodeGraphs as single_rows
        if single_rows is not None:
            mirror = self._table.mirror(spare=pages)
            self._graphs = single_rows(decoder, self.pool, mirror, max_tokens=self.max_tokens, drafting=guessed > 0)
        self._scheduler = Scheduler(
            pool=self.pool,
            allocator=self.allocator,
            tree=self.tree,
            tier=self.tier,
            table=self._table,
            options=options,
            speculator=speculator(decoder, self._graphs, most=guessed, spare=options.max_running, cost=step_cost),
        )
        self.grammars = GrammarCompiler(model.tokenizer, vocab=spec.vocab, eos_ids=spec.eos_ids)
        self._masks = Masks(rows=options.step_tokens, vocab=spec.vocab, device=decoder.device)
        self._arrivals = 0
        self._plan: StepPlan | None = None
        self._flight: _Flight | None = None
        self._totals: Counter[str] = Counter()
        self.latencies = Latencies()
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
        check_request(request, self.model, room=self.max_tokens)
        if request.grammar is not None and request.grammar.compiler is not self.grammars:
            raise BadRequest("the grammar was compiled for another engine", param="response_format")
        params, prompt = request.sampling, len(request.ids)
        most = self.max_tokens if params.max_tokens is None else min(self.max_tokens, prompt + params.max_tokens)
        tokenizer = self.model.tokenizer
        return Sequence(
            request=request,
            sink=sink,
            tokens=np.array(request.ids, dtype=np.int64),
            prompt=prompt,
            most=most,
            length=prompt,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            detokenizer=_detokenizer(tokenizer, request) if tokenizer and most > prompt else None,
            logprobs=torch.zeros(max(0, prompt - 1)) if request.prompt_logprobs else None,
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
            self._finish(sequence, "abort")

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
        if self._graphs is not None and plan.greedy:
            self.tier.loads().settle()
            self._table.refresh()
            launched = self._graphs.run(*self._table.single_rows(plan))
            self._land(_Flight(graphs=self._graphs, sequences=plan.sequences, launched=launched), plan)
        elif plan.sequences:
            self._postprocess(plan, self._run(plan))
        elif self._scheduler.waiting:  # for a slow tier, all of them
            self.tier.wait(_LONGEST_PAUSE_S)
        self._plan = None

    def _land(self, flight: "_Flight", plan: StepPlan) -> None:
        """Take a launched step's tokens in, while the device already runs the next one if nothing can change for it."""
        self._plan = plan
        if self._scheduler.run_ahead(flight.sequences):
            self._table.refresh()
            self._flight = replace(flight, launched=flight.graphs.again(flight.launched))
        self._postprocess(plan, flight.launched.greedy())
        self._plan = None
        if not self._scheduler.running:
            self._flight = None  # all have ended: nobody is left to land for

    def _run(self, plan: StepPlan) -> list[int]:
        """Compute the plan's rows; score prompts that ask for it; return a token for each row that draws one."""
        loads = self.tier.loads()
        if self._graphs is not None and plan.single:
            loads.settle()
            self._table.refresh()
            launched = self._graphs.run(*self._table.single_rows(plan))
            return self._draw(launched.logits, plan)
        if self._graphs is not None and plan.drafts:
            loads.settle()
            self._table.refresh()
            rows, widths = self._table.drafted_rows(plan), plan.widths.tolist()
            return self._draw(self._graphs.drafted(*rows, widths), plan)
        decoder = self.model.decoder
        try:
            hidden = decoder.forward(replace(self._table.layout(plan), loads=loads), self.pool).hidden
        finally:
            loads.settle()  # not all layers are run where all rows are dropped, or where one fails
        place = int(plan.widths.sum())
        drawing = list(range(place))
        for chunk in plan.chunks:
            self._score(chunk, hidden[place : place + chunk.scored])
            place += len(chunk.logits)
            if chunk.draws:
                drawing.append(place - 1)
        if not drawing:
            return []
        rows = torch.tensor(drawing, device=hidden.device)
        return self._draw(decoder.logits(hidden[rows]), plan)

    def _draw(self, logits: Tensor, plan: StepPlan) -> list[int]:
        """A token for each row of `logits`. On a GPU the masks are made while it computes the logits."""
        allowed = self._masks.of([sequence.matcher for sequence in plan.owners])
        return self._drawer.draw(logits, plan.owners, self._table.sampling(plan), allowed=allowed)

    def _score(self, chunk: Chunk, hidden: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow the chunk's rows, a few rows at a time."""
        sequence = chunk.sequence
        for start in range(0, len(hidden), SCORED_ROWS):
            logits = self.model.decoder.logits(hidden[start : start + SCORED_ROWS])
            first = int(chunk.rows[start])
            following = torch.from_numpy(sequence.tokens[first + 1 : first + 1 + len(logits)]).to(logits.device)
            chosen = logits.gather(1, following[:, None]).squeeze(1) - logits.logsumexp(-1)
            assert sequence.logprobs is not None
            sequence.logprobs[first : first + len(logits)] = chosen
            wanted = sequence.request.sampling.logprobs
            if wanted is not None:
                told = token_logprobs(logits, following, [wanted] * len(logits))
                sequence.told.update(enumerate(told, first))

    def _postprocess(self, plan: StepPlan, tokens: list[int]) -> None:
        self._totals["steps"] += 1
        seconds = self._clock() - self._began
        for chunk in plan.chunks:
            self._scheduler.advance(chunk)
            if chunk.last:
                self._prefilled(chunk.sequence)
        drawn = iter(tokens)
        for sequence, draft in zip(plan.drawing, plan.guesses, strict=True):
            self._take(sequence, draft.tolist(), list(islice(drawn, 1 + len(draft))))
        self._scheduler.ran(plan, seconds=seconds)

    def _take(self, sequence: Sequence, draft: list[int], drawn: list[int]) -> None:
        """Accept what was drawn after the last token, and after each guess that turned out to be what was drawn."""
        for at, token in enumerate(drawn):
            if sequence.phase is Phase.DONE or draft[:at] != drawn[:at]:
                break  # it ended while this step was already running, or the rest followed a wrong guess
            try:
                self._accept(sequence, token)
            except PromptsluiceError as error:
                self._give_up(sequence, error)
            except Exception as error:  # noqa: BLE001 - logged where the request is given up
                self._undeliverable(sequence, error)
            self._totals["accepted"] += at > 0
        self._totals["drafted"] += len(draft)
        if draft:
            self._scheduler.settle(sequence)

    def _prefilled(self, sequence: Sequence) -> None:
        if sequence.request.keep_kv and sequence.kv is None:
            sequence.kv = self.pool.read(self._table.slots(sequence, 0, sequence.prompt))
        if not sequence.generates:
            self._finish(sequence, "length")

    def _accept(self, sequence: Sequence, token: int) -> None:
        """Add a token to a sequence; tell its sink; end it if this was its last."""
        sequence.append(token)
        self._table.set_token(sequence)
        self._totals["generated"] += 1
        ended = sequence.matcher is not None and sequence.matcher.accept(token)
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
            self.tier.computed(len(sequence.plan), sequence.first_token - (sequence.admitted or sequence.first_token))
        self.latencies.token(sequence)
        reason, told = self._reason(sequence, token), self._drawer.told(sequence)
        delta = Delta(token_ids=(token,), prompt_logprobs=_of_prompt(sequence) if sequence.generated == 1 else ())
        if reason != "stop":  # what ends a text by its id is not part of it
            text, stopped = sequence.detokenizer.push(token) if sequence.detokenizer else ("", False)
            reason = "stop" if stopped or ended else reason
            delta = replace(delta, text=text, logprobs=() if told is None else (told,))
        if reason is None:
            sequence.sink.delta(delta)
        else:
            self._finish(sequence, reason, delta)

    def _reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.request.sampling
        if token in params.stop_token_ids or (token in self.model.spec.eos_ids and not params.ignore_eos):
            return "stop"
        return "length" if sequence.length == sequence.most else None

    def _finish(self, sequence: Sequence, reason: FinishReason, last: Delta | None = None) -> None:
        """End a sequence; `last` is what its last token added."""
        last = last or Delta(prompt_logprobs=() if sequence.generated else _of_prompt(sequence))
        try:
            rest = sequence.detokenizer.flush() if sequence.detokenizer else ""
        except Exception as error:  # noqa: BLE001 - logged where the request is given up
            self._undeliverable(sequence, error)
            return
        self._scheduler.finish(sequence)
        result = _result(sequence, reason)
        self.latencies.end(sequence, reason)
        self._totals["finished"] += 1
        self._totals["prompt"] += sequence.prompt
        self._totals["reused"] += result.reused_tokens
        self._totals["recomputed"] += result.recomputed_tokens
        try:
            sequence.sink.delta(replace(last, text=last.text + rest, finish_reason=reason))
            sequence.sink.done(result)
        except Exception as error:  # noqa: BLE001 - logged where the request is given up
            self._undeliverable(sequence, error)

    def _undeliverable(self, sequence: Sequence, error: Exception) -> None:
        """Give up a request whose detokenizer or sink broke, which must not harm the others."""
        logger.error("the output of request %s is lost", sequence.request.request_id, exc_info=error)
        self._give_up(sequence, PromptsluiceError(f"the output could not be delivered: {error}"))

    def _give_up(self, sequence: Sequence, error: PromptsluiceError) -> None:
        if sequence.phase is not Phase.DONE:
            self._scheduler.discard(sequence)
        try:
            sequence.sink.failed(error)
        except Exception:
            logger.exception("the sink of request %s failed", sequence.request.request_id)

    def refuse(self, sequence: Sequence, error: PromptsluiceError) -> None:
        """End a request that waits, with `error`."""
        assert sequence.phase is Phase.WAITING, sequence.phase
        self._give_up(sequence, error)

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
        self.tier.loads().settle()  # their pages are others' from here on
        for sequence in list(affected):
            if sequence.phase is not Phase.DONE:
                self._give_up(sequence, error)

    def relieve(self) -> None:
        """After a step for which the device had no memory: make steps smaller and try the same requests again.

        What cannot be made smaller fails with Overloaded.
        """
        self.tier.loads().settle()  # into pages that may be given to others now
        release_memory(self.model.decoder.device)
        if self._scheduler.relieve(self._plan):
            self._plan = self._flight = None
            return
        self.fail(Overloaded("the device has no memory for this request now", retry_after=10))

    def readings(self, stats: EngineStats) -> Readings:
        """For monitoring, from any thread: `stats` and all that is not worth counting in every step."""
        unused = self.allocator.free + self.tree.evictable
        return Readings(stats=stats, latencies=self.latencies, kv_usage=max(0.0, 1 - unused / self.allocator.pages))

    def stats(self) -> EngineStats:
        totals = self._totals
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
        self.tier.close()


def _detokenizer(tokenizer: TextDecoder, request: GenerationRequest) -> Detokenizer:
    params, after = request.sampling, request.ids[-_DECODED_BEHIND:] if request.continues else ()
    return Detokenizer(tokenizer, stops=params.stop, unstopped=params.min_tokens, after=after)


def _of_prompt(sequence: Sequence) -> tuple[TokenLogprobs, ...]:
    return tuple(one for _, one in sorted(sequence.told.items()))


def _result(sequence: Sequence, reason: FinishReason) -> Result:
    now = time.monotonic()
    return Result(
        finish_reason=reason,
        prompt_tokens=sequence.prompt,
        completion_tokens=sequence.generated,
        cached_tokens=sequence.cached,
        loaded_tokens=min(sequence.loaded, sequence.cached),
        reused_tokens=sequence.reused - sequence.recomputed,
        recomputed_tokens=sequence.recomputed,
        queue_ms=1000 * ((sequence.admitted or now) - sequence.submitted),
        ttft_ms=1000 * ((sequence.first_token or now) - sequence.submitted),
        prompt_logprobs=sequence.logprobs,
        kv=sequence.kv,
    )
