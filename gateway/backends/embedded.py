"""Our own engine as a backend: chat messages to tokens, stored chunk KV into place, deltas to frames."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...backend_engine.types import Delta, GenerationRequest, Result, SamplingParams
from ...compressors.context import Score
from ...policies import Action, Plan
from ...policies.schema import EmbeddedBackend as EngineSpec
from ...prompt import (
    BadRequest,
    ContextTooLong,
    ModelUnavailable,
    Overloaded,
    Prompt,
    PromptsluiceError,
    Report,
    Segment,
    StepReport,
    Usage,
)
from ..edge import internal_error, log, log_failure
from ..parameters import ChatParameters, chat_parameters
from ..salts import Salts
from ..wire import ChatWriter
from ..workers import Workers
from .base import Answer, Backend, Call, ModelCard, Stream, counted_tokens, estimated_tokens
from .choices import choice_seed, described, merged
from .deltas import as_answer, as_frames

if TYPE_CHECKING:
    from ...backend_engine.grammar.compiler import CompiledGrammar
    from ...backend_engine.readings import Readings
    from ...backend_engine.types import Reuse
    from ...kv_reuse.store import ChunkStore
    from .engine_room import EngineRoom, Tokens

_DRAIN_S = 2.0
_COMPILE_S = 30.0


@dataclass(slots=True, kw_only=True)
class _Ready:
    """A call as the engine takes it, one request a choice, and what each came to in the end."""

    requests: tuple[GenerationRequest, ...]
    results: dict[int, Result] = field(default_factory=dict)


class EmbeddedBackend(Backend):
    """Answers with a model in this process. `path` finds its files, `store` opens the chunk store; both may block.

    `salts` keep tenants' chunks apart, as the file in force has it; `prefixes` is the folder of the prefix cache's disk
    tier, where there is one.
    """

    kv_reuse = True

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        *,
        path: Callable[[], Path],
        store: Callable[[], "ChunkStore"],
        salts: Callable[[], Salts] = Salts,
        prefixes: Path | None = None,
    ) -> None:
        super().__init__(name)
        self._salts = salts
        self._spec = spec
        self._path = path
        self._store = store
        self._prefixes = prefixes
        self._room: EngineRoom | None = None
        self._lock = threading.Lock()
        self._loading: asyncio.Task[EngineRoom] | None = None
        self._encoders = Workers("tokenizing", threads=2, waiting=256)
        self._compilers = Workers("grammar", threads=2, waiting=64)
        self._warmers = Workers("warming", threads=1, waiting=256)

    async def start(self) -> None:
        """Begin to load the model; requests that come meanwhile wait for it."""
        self._loading = asyncio.create_task(asyncio.to_thread(self._opened))
        self._loading.add_done_callback(lambda done: _log(done, f"loading {self._spec.model}"))

    async def available(self) -> None:
        await self._engine()

    async def close(self) -> None:
        self._warmers.close()
        self._encoders.close()
        self._compilers.close()
        if self._loading is not None:
            await asyncio.wait({self._loading})
        if self._room is not None:
            await asyncio.to_thread(self._room.service.stop, _DRAIN_S)

    def ready(self) -> str | None:
        if self._loading is None or not self._loading.done():
            return f"the model {self._spec.model} is being loaded"
        error = self._loading.exception()
        if error is None:
            return None if self.healthy() else "the engine hangs in a step; the log says where"
        known = isinstance(error, PromptsluiceError)
        return error.message if known else f"the model {self._spec.model} cannot be loaded; the log says more"

    def healthy(self) -> bool:
        return self._room is None or self._room.service.healthy()

    def stats(self) -> Mapping[str, float]:
        if self._room is None:
            return {}
        service = self._room.service
        gauges = {name: float(value) for name, value in asdict(service.stats()).items()}
        gauges |= {"healthy": float(service.healthy()), "step_s": service.step_s}
        for tier in self._room.reuser.stats():
            counters = {name: value for name, value in asdict(tier).items() if name != "tier"}
            gauges |= {f"kv_{tier.tier}_{name}": float(value) for name, value in counters.items()}
        return gauges

    def readings(self) -> "Readings | None":
        return None if self._room is None else self._room.service.readings()

    async def models(self) -> Sequence[ModelCard]:
        limit = None if self._room is None else self._room.limit
        return [ModelCard(id=model, owned_by="promptsluice", context=limit) for model in self._spec.models]

    def count_tokens(self, text: str) -> int:
        room = self._room
        return estimated_tokens(text) if room is None else counted_tokens(text, room.tokenizer.count)

    def tokenize(self, prompt: Prompt | str) -> Sequence[int]:
        room = self._opened()
        if isinstance(prompt, str):
            return room.tokenizer.encode_plain(prompt)
        return room.encode(prompt, chunks=frozenset(), with_tools=True).encoded.ids

    def detokenize(self, ids: Sequence[int]) -> str:
        room = self._opened()
        for place, token in enumerate(ids):
            if token >= room.model.spec.vocab:
                raise BadRequest(
                    f"tokens[{place}] is no token of {self._spec.model}, which has {room.model.spec.vocab}",
                    param=f"tokens[{place}]",
                )
        return room.tokenizer.decode(ids, skip_special_tokens=False)

    def scorer(self) -> Score | None:
        return lambda text: self._opened().score(text)

    def warm(self, texts: Sequence[str], *, collection: str) -> None:
        """Have the KV of chunks computed in the background; what finds no room is computed when it is first missed, and
        so is what each tenant has for itself."""
        salt = self._salts().ingested(collection)
        if salt is not None:
            self._in_background(lambda: self._opened().warm(texts, salt=salt))

    def forget(self, texts: Sequence[str], *, collection: str) -> None:
        """Have the KV of chunks deleted in the background, after what is being computed now."""
        self._in_background(lambda: self._opened().forget(texts, salts=self._salts().everywhere(collection)))

    async def complete(self, call: Call) -> Answer | Stream:
        parameters = chat_parameters(call.prompt.body)
        if parameters.n > self._spec.queue:
            raise BadRequest(f"n must be at most {self._spec.queue}, what may wait here at a time", param="n")
        room = await self._engine()
        grammar = await self._compiled(room, parameters) if parameters.structured else None
        ready = await self._encoders.run(lambda: self._readied(room, call, parameters, grammar))
        writer, count = ChatWriter(model=call.model), parameters.n
        deltas = merged([self._deltas(room, ready, index, call.report) for index in range(count)])
        describe = described(room.tokenizer.token_bytes) if parameters.logprobs else None
        if not call.stream:
            return await as_answer(
                deltas, writer=writer, usage=lambda: usage_of(ready.results), choices=count, describe=describe
            )
        frames = as_frames(
            deltas,
            writer=writer,
            usage=lambda: usage_of(ready.results),
            include_usage=call.include_usage,
            choices=count,
            describe=describe,
        )
        return Stream(frames=frames)

    async def _compiled(self, room: "EngineRoom", parameters: ChatParameters) -> "CompiledGrammar":
        """The grammar that a request asks for, made by workers of its own: one that takes long delays no others."""
        try:
            return await self._compilers.run(lambda: room.compile(parameters.grammar()), timeout_s=_COMPILE_S)
        except TimeoutError as error:
            message = f"compiling the grammar takes longer than {_COMPILE_S:g} seconds; make it simpler"
            raise BadRequest(message, param="response_format") from error

    def _readied(
        self, room: "EngineRoom", call: Call, parameters: ChatParameters, grammar: "CompiledGrammar | None"
    ) -> _Ready:
        policy = call.policy.reuse
        chunks = reused_segments(call.plan)
        tokens = room.encode(call.prompt, chunks=chunks, with_tools=parameters.tool_choice != "none")
        ids = tokens.encoded.ids
        count_template(call.report, len(ids))
        sampling = capped(parameters.sampling(room.defaults), prompt=len(ids), limit=room.limit)
        request = GenerationRequest(
            ids=ids,
            sampling=sampling,
            grammar=grammar,
            reuse=self._reused(room, call, tokens) if tokens.encoded.spans else None,
            namespace=call.tenant,
            prefix_cache=policy.mode != "off",
            request_id=call.request_id,
        )
        seeds = (choice_seed(sampling.seed, index) for index in range(parameters.n))
        return _Ready(requests=tuple(replace(request, sampling=replace(sampling, seed=seed)) for seed in seeds))

    def _reused(self, room: "EngineRoom", call: Call, tokens: "Tokens") -> "Reuse | None":
        """Look the chunks up; what is missing, or could be better, is computed in the background for the next time."""
        began = time.perf_counter()
        found = room.reuse(tokens, call.policy.reuse, salt=lambda segment: self._salt(call, segment))
        for salt, plan in found.plans:
            if wanted := plan.misses + plan.poorer:
                self._in_background(
                    lambda wanted=wanted, plan=plan, salt=salt: room.reuser.warm(wanted, anchor=plan.anchor, salt=salt)
                )
        size = len(tokens.encoded.ids)
        call.report.steps.append(
            StepReport(
                name=call.policy.reuse.mode,
                ms=(time.perf_counter() - began) * 1000,
                tokens_before=size,
                tokens_after=size,
                note=f"{found.hits} chunks loaded, {found.misses} missing",
            )
        )
        return found.reuse

    def _salt(self, call: Call, segment: Segment) -> str:
        retrieve = call.policy.retrieve
        if segment.original is None and retrieve is not None:
            return self._salts().retrieved(retrieve.collection, tenant=call.tenant)
        return self._salts().tenant(call.tenant)

    async def _deltas(
        self, room: "EngineRoom", ready: _Ready, index: int, report: Report
    ) -> AsyncGenerator[Delta, None]:
        """Of one choice. The first is queued first: it computes the prompt, and the others find it in the prefix
        tree.
        """
        request = ready.requests[index]
        generation = room.service.generate(request)
        try:
            async for delta in generation:
                if delta.finish_reason == "abort":
                    raise Overloaded("the server is shutting down")
                yield delta
        except PromptsluiceError as error:
            # The plain class is the engine's word for a bug; its message is for the log.
            if type(error) is PromptsluiceError:
                raise internal_error(request.request_id) from error
            raise
        finally:
            generation.abort()
        ready.results[index] = generation.result
        if index == 0:
            note(report, generation.result)

    async def _engine(self) -> "EngineRoom":
        """The loaded engine; ModelUnavailable when it could not be loaded."""
        assert self._loading is not None, f"backend {self.name!r} was not started"
        await asyncio.wait({self._loading})
        reason = self.ready()
        if reason is not None:
            raise ModelUnavailable(reason)
        return self._loading.result()

    def _opened(self) -> "EngineRoom":
        from .engine_room import EngineRoom

        with self._lock:
            if self._room is None:
                self._room = EngineRoom.open(
                    self._spec, path=self._path(), store=self._store(), prefixes=self._prefixes
                )
            return self._room

    def _in_background(self, job: Callable[[], object]) -> None:
        try:
            self._warmers.submit(job).add_done_callback(lambda done: _log(done, "warming chunks"))
        except Overloaded:
            return


def _log(done: "asyncio.Task[Any] | Future[Any]", what: str) -> None:
    """A failure in the background has nobody to tell but the log."""
    error = None if done.cancelled() else done.exception()
    if isinstance(error, PromptsluiceError):
        log.error("%s failed: %s", what, error.message)
    elif error is not None:
        log_failure(error, request_id=what)


def reused_segments(plan: Plan | None) -> frozenset[int]:
    """The segments whose stored KV the plan wants."""
    decisions = () if plan is None else plan.decisions
    return frozenset(one.segment for one in decisions if one.action in (Action.REUSE, Action.BLEND))


def capped(sampling: SamplingParams, *, prompt: int, limit: int) -> SamplingParams:
    """`max_tokens` is a cap, so that more than there is room for is no error; a prompt without room for a token is."""
    room = limit - prompt
    if room < 1:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens, but this model takes {limit} with the answer; shorten it by {1 - room}",
            param="messages",
        )
    return replace(sampling, max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room))


def count_template(report: Report, tokens: int) -> None:
    """Make the report's sizes exact: the chat template's own tokens stand in the prompt before and after."""
    template = tokens - report.tokens_out
    report.tokens_in += template
    report.tokens_out = tokens


def note(report: Report, result: Result) -> None:
    """Enter what the engine did."""
    report.cached = result.cached_tokens
    report.loaded = result.loaded_tokens
    report.reused = result.reused_tokens
    report.recomputed = result.recomputed_tokens


def usage_of(results: Mapping[int, Result]) -> Usage:
    """As it is billed: the prompt once, the tokens of all choices.

    `cached_tokens` are prompt tokens that were not computed for the first choice, by prefix or by chunk.
    """
    assert 0 in results, "the usage is read after the last delta"
    return Usage(
        prompt_tokens=results[0].prompt_tokens,
        completion_tokens=sum(result.completion_tokens for result in results.values()),
        cached_tokens=results[0].cached_tokens + results[0].reused_tokens,
    )
