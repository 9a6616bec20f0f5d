"""A chat answered from the answers that were given before, where its policy says so; else by its backend, and kept."""

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from ..policies.schema import CacheSpec
from ..prompt import PromptsluiceError
from .answer_cache import AnswerCache, Key, key_of
from .backends.base import Answer, Backend, Call, Frame, Stream
from .edge import log
from .house import Sluice
from .records.record import CACHE_HEADER as HEADER
from .replay import Gathering, chunks_of

if TYPE_CHECKING:
    from .answer_cache import Vector

_CHARS = 16  # a token, above what any text has: beyond that nothing is tokenized to see that it is too long


async def completed(sluice: Sluice, backend: Backend, call: Call) -> Answer | Stream:
    """The reply to a call, in the framing that it asks for. The header says whether it was known (`hit`) or not."""
    spec = call.policy.cache
    if spec is None:
        return await backend.complete(call)
    key = await sluice.readers.run(lambda: key_of(call, backend=backend.name))
    answers, vector = sluice.rooms.answers, None
    found = answers.get(key)
    if found is None and spec.similarity is not None and key.question:
        vector = await _vector(sluice, key)
        found = None if vector is None else answers.nearest(key, vector, similarity=spec.similarity)
    sluice.metrics.recalled(call.report.policy, hit=found is not None)
    if found is not None:
        return _again(found, call)
    return _kept(await backend.complete(call), _Place(answers, key, spec, vector))


async def _vector(sluice: Sluice, key: Key) -> "Vector | None":
    """Of the question. Without an embedder only the very same question is known again, and so is one that the embedder
    would not read to its end: two that differ only behind that would be one to it.
    """

    def read() -> "Vector | None":
        embedder, question = sluice.rooms.embedder(), key.question
        most = embedder.max_tokens
        if len(question) > most * _CHARS or embedder.sizes([question])[0] > most:
            return None
        return embedder.embed([question])[0]

    try:
        return await sluice.librarians.run(read)
    except PromptsluiceError as error:
        log.warning("questions cannot be compared: %s", error.message)
        return None


def _again(body: bytes, call: Call) -> Answer | Stream:
    """Nothing is billed for it, so that it brings no usage for the books; what the client reads is the first one's."""
    if not call.stream:
        return Answer(body=body, headers={HEADER: "hit"})
    frames = chunks_of(json.loads(body), include_usage=call.include_usage)
    return Stream(frames=_all(frames), headers={HEADER: "hit"})


async def _all(frames: Iterable[Frame]) -> AsyncGenerator[Frame, None]:
    for frame in frames:
        yield frame


class _Place:
    """Where an answer is kept."""

    def __init__(self, answers: AnswerCache, key: Key, spec: CacheSpec, vector: "Vector | None") -> None:
        self._answers, self._key, self._spec, self._vector = answers, key, spec, vector

    def put(self, body: bytes) -> None:
        self._answers.put(self._key, body, ttl=self._spec.ttl, vector=self._vector)


def _kept(reply: Answer | Stream, place: _Place) -> Answer | Stream:
    headers = {**reply.headers, HEADER: "miss"}
    if isinstance(reply, Stream):
        return replace(reply, frames=_noted(reply.frames, place), headers=headers)
    if reply.status == 200 and _is_whole(reply.body):
        place.put(reply.body)
    return replace(reply, headers=headers)


async def _noted(frames: AsyncGenerator[Frame, None], place: _Place) -> AsyncGenerator[Frame, None]:
    """The same frames; what they come to is kept once the answer is whole."""
    gathering = Gathering()
    async with aclosing(frames):
        async for frame in frames:
            gathering.add(frame)
            yield frame
    whole = gathering.whole()
    if whole is not None and _is_whole(whole):
        place.put(whole)


def _is_whole(body: bytes) -> bool:
    """Whether it can be said again in either framing, which only saying it shows."""
    try:
        completion = json.loads(body)
        for _ in chunks_of(completion, include_usage=True):
            pass
        choices = completion["choices"]
        return bool(choices) and all(isinstance(one["index"], int) and one["finish_reason"] for one in choices)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
