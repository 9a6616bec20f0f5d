"""The null backend: says the question back, word by word. Proof of the contract, and the double that tests use."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence

from ...backend_engine.types import Delta
from ...prompt import BadRequest, Usage
from ..parameters import Sampling, chat_parameters
from ..text_parameters import text_parameters
from ..text_wire import Echo, TextWriter
from ..wire import ChatWriter
from .base import Answer, Asked, Backend, Call, ModelCard, Stream, TextCall
from .choices import merged
from .deltas import Writer, as_answer, as_frames

_WORD = re.compile(r"\s*\S+")


class EchoBackend(Backend):
    """Answers with the last user message, or with the prompt, whose ids count as words; a word counts as a token.
    `delay_s` passes before each word.
    """

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
        _refuse(parameters)
        if (offer := parameters.offer) is not None and offer.forced:
            raise BadRequest("an echo calls nothing", param="tool_choice", code="unsupported_value")
        prompt_tokens = sum(self.count_tokens(segment.text) for segment in call.prompt.segments)
        writer = ChatWriter(model=call.model)
        return await self._reply(call, parameters, [call.prompt.question], writer, prompt_tokens=prompt_tokens)

    async def continue_text(self, call: TextCall) -> Answer | Stream:
        parameters = text_parameters(call.body)
        _refuse(parameters)
        texts = [one if isinstance(one, str) else " ".join(map(str, one)) for one in parameters.prompts]
        echoes = [Echo(text=text) for text in texts] if parameters.echo else ()
        writer = TextWriter(model=call.model, n=parameters.n, echoes=echoes)
        prompt_tokens = sum(map(self.count_tokens, texts))
        return await self._reply(call, parameters, texts, writer, prompt_tokens=prompt_tokens)

    async def _reply(
        self, call: Asked, parameters: Sampling, texts: Sequence[str], writer: Writer, *, prompt_tokens: int
    ) -> Answer | Stream:
        """Say each text back, `n` times."""
        most = parameters.sampling().max_tokens
        said = [words for text in texts for words in [_WORD.findall(text)] * parameters.n]
        usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=sum(len(words[:most]) for words in said))
        pieces = merged([self._deltas(words, most) for words in said])
        if not call.stream:
            return await as_answer(pieces, writer=writer, usage=lambda: usage, choices=len(said))
        frames = as_frames(
            pieces, writer=writer, usage=lambda: usage, include_usage=call.include_usage, choices=len(said)
        )
        return Stream(frames=frames)

    async def _deltas(self, words: Sequence[str], most: int | None) -> AsyncGenerator[Delta, None]:
        for word in words[:most]:
            await asyncio.sleep(self._delay_s)
            yield Delta(text=word)
        yield Delta(finish_reason="stop" if most is None or len(words) <= most else "length")


def _refuse(parameters: Sampling) -> None:
    """What an echo cannot do."""
    if parameters.structured:
        parameters.grammar()  # what is wrong about it comes first
        raise BadRequest("an echo cannot be restricted", param="response_format", code="unsupported_value")
    if parameters.told is not None:
        raise BadRequest("an echo has no log-probabilities", param="logprobs", code="unsupported_value")
