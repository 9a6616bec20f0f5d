"""The null backend: says the question back, word by word. Proof of the contract, and the double that tests use."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence

from ...backend_engine.types import Delta
from ...prompt import BadRequest, Usage
from ..parameters import chat_parameters
from ..wire import ChatWriter
from .base import Answer, Backend, Call, ModelCard, Stream
from .choices import merged
from .deltas import as_answer, as_frames

_WORD = re.compile(r"\s*\S+")


class EchoBackend(Backend):
    """Answers with the last user message; a word counts as a token. `delay_s` passes before each word."""

    def __init__(self, name: str, *, models: Sequence[str], delay_s: float = 0.0) -> None:
        super().__init__(name)
        self._models = tuple(models)
        self._delay_s = delay_s

    async def models(self) -> Sequence[ModelCard]:
        return [ModelCard(id=model, owned_by="promptsluice") for model in self._models]

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def complete(self, call: Call) -> Answer | Stream:
        parameters = chat_parameters(call.prompt.body)
        if parameters.structured:
            parameters.grammar()  # what is wrong about it comes first
            raise BadRequest("an echo cannot be restricted", param="response_format", code="unsupported_value")
        if parameters.logprobs:
            raise BadRequest("an echo has no log-probabilities", param="logprobs", code="unsupported_value")
        sampling = parameters.sampling()
        words = _WORD.findall(call.prompt.question)
        kept = words if sampling.max_tokens is None else words[: sampling.max_tokens]
        usage = Usage(
            prompt_tokens=sum(self.count_tokens(segment.text) for segment in call.prompt.segments),
            completion_tokens=len(kept) * parameters.n,
        )
        writer = ChatWriter(model=call.model)
        reason = "stop" if len(kept) == len(words) else "length"
        deltas = merged([self._deltas(kept, reason) for _ in range(parameters.n)])
        if not call.stream:
            return await as_answer(deltas, writer=writer, usage=lambda: usage, choices=parameters.n)
        frames = as_frames(
            deltas, writer=writer, usage=lambda: usage, include_usage=call.include_usage, choices=parameters.n
        )
        return Stream(frames=frames)

    async def _deltas(self, words: Sequence[str], reason: str) -> AsyncGenerator[Delta, None]:
        for word in words:
            await asyncio.sleep(self._delay_s)
            yield Delta(text=word)
        yield Delta(finish_reason="stop" if reason == "stop" else "length")
