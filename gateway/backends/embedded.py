"""Our own engine as a backend: chat messages to tokens, stored chunk KV into place, deltas to frames."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...backend_engine.types import GenerationRequest
from ...compressors.context import Score
from ...compressors.result import Span
from ...policies import Line, Policy
from ...policies.schema import EmbeddedBackend as EngineSpec
from ...policies.stored import StoredKV
from ...prompt import (
    BadRequest,
    ModelUnavailable,
    Prompt,
    PromptsluiceError,
)
from ..parameters import ChatParameters, chat_parameters
from ..salts import Salts
from ..text_parameters import text_parameters
from ..text_wire import TextWriter
from ..tools.use import ToolUse
from ..wire import ChatWriter
from ..workers import Workers
from .background import Background, log_outcome
from .base import Answer, Asked, Backend, Call, ModelCard, Stream, TextCall, counted_tokens, estimated_tokens
from .choices import described, merged
from .deltas import ToolReading, Writer, as_answer, as_frames
from .generations import Ready, capped, count_template, deltas, retrieved_segments, reused_segments
from .restrictions import Restrictions
from .texts import readied

if TYPE_CHECKING:
    from ...backend_engine.grammar.compiler import CompiledGrammar
    from ...backend_engine.readings import Readings
    from ...backend_engine.text_scoring import Scores
    from ...backend_engine.types import Result
    from ...kv_reuse.gate import Standing
    from ...kv_reuse.rounding import ChunkDtype
    from ...kv_reuse.store import ChunkStore
    from .decisions import Learn
    from .engine_room import EngineRoom, Tokens
    from .reuse_control import Decided

_KEYS = 1024  # before a row of a prompt, for a straight line of what rows cost
_DRAIN_S = 2.0


class EmbeddedBackend(Backend):
    """Answers with a model in this process. `path` finds its files, `store` opens the chunk store; both may block.

    `salts` keep tenants' chunks apart, as the file in force has it; `prefixes` is the folder of the prefix cache's disk
    tier, where there is one; `standings` that of what blending was seen to lose. Chunks are kept in `chunk_dtype`.
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
        standings: Path | None = None,
        chunk_dtype: "ChunkDtype" = "auto",
    ) -> None:
        super().__init__(name)
        self._salts = salts
        self._spec = spec
        self._chunk_dtype: ChunkDtype = chunk_dtype
        self._path = path
        self._store = store
        self._prefixes = prefixes
        self._standings = standings
        self._room: EngineRoom | None = None
        self._lock = threading.Lock()
        self._loading: asyncio.Task[EngineRoom] | None = None
        self._encoders = Workers("tokenizing", threads=2, waiting=256)
        self._restrictions = Restrictions()
        self._background = Background("warming chunks")

    async def start(self) -> None:
        """Begin to load the model; requests that come meanwhile wait for it."""
        self._loading = asyncio.create_task(asyncio.to_thread(self._opened))
        self._loading.add_done_callback(lambda done: log_outcome(done, f"loading {self._spec.model}"))

    async def available(self) -> None:
        await self._engine()

    async def close(self) -> None:
        self._background.close()
        self._encoders.close()
        self._restrictions.close()
        if self._loading is not None:
            await asyncio.wait({self._loading})
        if self._room is not None:
            await asyncio.to_thread(self._background.settle)  # what was deleted does not wait for another life
            self._room.control.close()
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
        gauges["kv_jobs"] = float(self._background.unfinished)
        for tier in self._room.reuser.stats():
            counters = {name: value for name, value in asdict(tier).items() if name != "tier"}
            gauges |= {f"kv_{tier.tier}_{name}": float(value) for name, value in counters.items()}
        return gauges | self._room.control.readings()

    def blends(self) -> "Mapping[str, Standing]":
        return {} if self._room is None else self._room.control.standings()

    def readings(self) -> "Readings | None":
        return None if self._room is None else self._room.service.readings()

    async def models(self) -> Sequence[ModelCard]:
        limit = None if self._room is None else self._room.limit
        return [ModelCard(id=model, owned_by="promptsluice", context=limit) for model in self._spec.models]

    def prefill_cost(self) -> Line | None:
        measured = {} if self._room is None else self._room.control.readings()
        if "reuse_cost_row_s" not in measured:
            return None
        # What a row costs grows with the keys before it.
        row_s = measured["reuse_cost_row_s"] + _KEYS * measured.get("reuse_cost_pair_s", 0.0)
        return Line(1000 * measured.get("reuse_cost_step_s", 0.0), 1000 * row_s)

    def count_tokens(self, text: str) -> int:
        room = self._room
        return estimated_tokens(text) if room is None else counted_tokens(text, room.tokenizer.count)

    def tokenize(self, prompt: Prompt | str) -> Sequence[int]:
        room = self._opened()
        if isinstance(prompt, str):
            return room.tokenizer.encode_plain(prompt)
        return room.encode(prompt, chunks=frozenset(), with_tools=True).encoded.ids

    def count_prompt(self, prompt: Prompt) -> int:
        return len(self.tokenize(prompt))

    def detokenize(self, ids: Sequence[int]) -> str:
        room = self._opened()
        for place, token in enumerate(ids):
            if token >= room.model.spec.vocab:
                raise BadRequest(
                    f"tokens[{place}] is no token of {self._spec.model}, which has {room.model.spec.vocab}",
                    param=f"tokens[{place}]",
                )
        return room.tokenizer.decode(ids, skip_special_tokens=False)

    def stored_kv(self, policy: Policy, *, tenant: str) -> StoredKV | None:
        if self._room is None or policy.reuse.mode not in ("reuse", "blend"):
            return None
        from .stored_text import StoredText

        return StoredText(self._room, policy, salt=self._salts().tenant(tenant))

    def scorer(self) -> Score | None:
        return self._scores

    def _scores(
        self,
        texts: Sequence[str],
        *,
        wanted: Sequence[Sequence[Span]] | None = None,
        given: str = "",
        remaining: Callable[[], float],
    ) -> "Iterator[Scores]":
        return self._opened().scorer(texts, wanted=wanted, given=given, remaining=remaining)

    def warm(self, texts: Sequence[str], *, collection: str) -> None:
        """Have the KV of chunks computed in the background; what finds no room is computed when it is first missed, and
        so is what each tenant has for itself."""
        salt = self._salts().ingested(collection)
        if salt is not None:
            self._background.run(lambda: self._opened().warm(texts, salt=salt))

    def forget(self, texts: Sequence[str], *, collection: str) -> None:
        """Have the KV of chunks deleted in the background, after what is being computed now."""
        salts = self._salts
        self._background.run(lambda: self._opened().forget(texts, salts=salts().everywhere(collection)), must=True)

    async def complete(self, call: Call) -> Answer | Stream:
        parameters = chat_parameters(call.prompt.body)
        self._refuse_many(parameters.n, param="n")
        offer = parameters.offer
        room = await self._engine()
        tools = ToolUse.of(offer, room.tokenizer.tool_template)
        grammar = await self._restrictions.compiled(room, parameters, tools)
        ready = await self._encoders.run(lambda: self._readied(room, call, parameters, tools, grammar))
        self._refuse_long(ready, param="n")
        writer = ChatWriter(model=call.model)
        reading = None if tools is None else ToolReading(tools.reader, writer.call)
        return await self._reply(room, call, ready, writer, told=parameters.told is not None, tools=reading)

    async def continue_text(self, call: TextCall) -> Answer | Stream:
        parameters = await self._encoders.run(lambda: text_parameters(call.body))
        self._refuse_many(parameters.choices, param="prompt" if len(parameters.prompts) > 1 else "n")
        room = await self._engine()
        grammar = await self._restrictions.compiled(room, parameters)
        ready, echoes = await self._encoders.run(lambda: readied(room, call, parameters, grammar))
        self._refuse_long(ready, param="prompt")
        writer = TextWriter(model=call.model, n=parameters.n, echoes=echoes)
        return await self._reply(room, call, ready, writer, told=parameters.told is not None)

    async def _reply(
        self,
        room: "EngineRoom",
        call: Asked,
        ready: Ready,
        writer: Writer,
        *,
        told: bool,
        tools: ToolReading | None = None,
    ) -> Answer | Stream:
        """Run a call's requests; `told`: with their tokens' log-probabilities."""
        count = len(ready.requests)
        call.reading.begin()
        pieces = merged([deltas(room.service, ready, index, call.report) for index in range(count)])
        describe = described(room.tokenizer.token_bytes) if told else None
        if not call.stream:
            return await as_answer(
                pieces, writer=writer, usage=ready.usage, choices=count, describe=describe, tools=tools
            )
        frames = as_frames(
            pieces,
            writer=writer,
            usage=ready.usage,
            include_usage=call.include_usage,
            choices=count,
            describe=describe,
            tools=tools,
        )
        return Stream(frames=frames)

    def _refuse_many(self, choices: int, *, param: str) -> None:
        """More than may wait could never all begin."""
        most = self._spec.queue
        if choices > most:
            raise BadRequest(f"a request may ask for at most {most} answers here, not {choices}", param=param)

    def _refuse_long(self, ready: Ready, *, param: str) -> None:
        """What could never wait all at once would be told to come back for ever."""
        tokens, most = sum(len(request.ids) for request in ready.requests), self._spec.queue_tokens
        if len(ready.requests) > 1 and tokens > most:
            message = f"{len(ready.requests)} choices have {tokens} prompt tokens, but at most {most} may wait here"
            raise BadRequest(f"{message}; ask for fewer, or shorten the prompt", param=param)

    def _readied(
        self,
        room: "EngineRoom",
        call: Call,
        parameters: ChatParameters,
        tools: ToolUse | None,
        grammar: "CompiledGrammar | None",
    ) -> Ready:
        policy = call.policy.reuse
        chunks = reused_segments(call.plan)
        if policy.mode in ("reuse", "blend"):
            chunks |= retrieved_segments(call.prompt)
        tokens = room.encode(call.prompt, chunks=chunks, with_tools=parameters.tool_choice != "none")
        ids = tokens.encoded.ids
        count_template(call.report, len(ids))
        sampling = capped(parameters.sampling(room.defaults), prompt=len(ids), limit=room.limit)
        if tools is not None and grammar is None:
            sampling = replace(sampling, stop=(*sampling.stop, *tools.stops))
        decided, learn = self._decided(room, call, tokens)
        request = GenerationRequest(
            ids=ids,
            sampling=sampling,
            grammar=grammar,
            reuse=None if decided is None else decided.reuse,
            blending=None if decided is None else decided.blending,
            namespace=call.tenant,
            prefix_cache=policy.mode != "off",
            request_id=call.request_id,
        )

        def finished(result: "Result") -> None:
            room.control.finished(result, decided)
            learn(result)

        return Ready.of([request], n=parameters.n, finished=finished)

    def _decided(self, room: "EngineRoom", call: Call, tokens: "Tokens") -> "tuple[Decided | None, Learn]":
        from .decisions import decided

        if call.policy.reuse.mode not in ("reuse", "blend"):
            return None, lambda result: None
        return decided(room, call, tokens, salts=self._salts(), background=self._background)

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
                    self._spec,
                    path=self._path(),
                    store=self._store(),
                    prefixes=self._prefixes,
                    standings=self._standings,
                    chunk_dtype=self._chunk_dtype,
                )
                self._room.control.start()
            return self._room
