"""How a step of the optimizer asks a model: a chat that goes straight to a backend, under no policy, and into the books
of the request that it is for.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from ..compressors.context import Generated
from ..policies import Policy
from ..prompt import Prompt, PromptsluiceError, Report, UpstreamError, UpstreamTimeout, Usage
from .backends.base import Answer, Backend, Call, estimated_tokens
from .keys.ticket import Spent, Ticket

# Backends are asked directly, so that no policy of this gateway can apply to such a chat; and where a backend is a
# gateway of this kind, this keeps it from summarizing in turn.
_OFF = {"x-promptsluice-policy": "off"}


class Generating:
    """For one request: to be called from a worker thread, answered on `loop`. `usage` is the sum of what was billed,
    `ticket` the request's account, which is charged.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        loop: asyncio.AbstractEventLoop,
        *,
        request_id: str,
        tenant: str,
        ticket: Ticket | None = None,
    ) -> None:
        self._backends, self._loop = backends, loop
        self._request_id, self._tenant, self._ticket = request_id, tenant, ticket
        self.usage = Usage()

    def __call__(
        self, messages: Sequence[Mapping[str, str]], *, backend: str, model: str, max_tokens: int, timeout_s: float
    ) -> Generated:
        asked = self._answer(messages, backend=backend, model=model, max_tokens=max_tokens)
        future = asyncio.run_coroutine_threadsafe(asked, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"backend {backend} did not answer within {timeout_s:.1f} s") from None

    async def _answer(
        self, messages: Sequence[Mapping[str, str]], *, backend: str, model: str, max_tokens: int
    ) -> Generated:
        body = {"model": model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        call = Call(
            prompt=Prompt.from_body(json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")),
            policy=Policy(),
            model=model,
            report=Report(backend=backend),
            request_id=self._request_id,
            tenant=self._tenant,
            headers=_OFF,
        )
        if backend not in self._backends:
            raise PromptsluiceError(f"there is no backend {backend!r} to ask")
        chosen = self._backends[backend]
        await chosen.available()
        prompt = sum(estimated_tokens(message["content"]) for message in messages)
        async with self._account(prompt=prompt, output=max_tokens) as spent:
            reply = await self._reply(chosen, call, prompt, spent)
        if reply.usage is not None:
            self.usage = _sum(self.usage, reply.usage)
        return _generated(reply.body)

    def _account(self, *, prompt: int, output: int) -> AbstractAsyncContextManager[Spent]:
        return nullcontext(Spent()) if self._ticket is None else self._ticket.aside(prompt=prompt, output=output)

    async def _reply(self, backend: Backend, call: Call, prompt: int, spent: Spent) -> Answer:
        """The whole answer. Enters what it cost: of an error nothing, of one that does not come in time the prompt,
        once the backend was given it.
        """
        try:
            reply = await backend.complete(call)
            assert isinstance(reply, Answer), "no stream was asked for"
            if reply.status >= 400:
                raise UpstreamError(f"backend {backend.name} answered with status {reply.status}")
        except (UpstreamTimeout, asyncio.CancelledError):
            spent.tokens = prompt if call.reading.begun else 0
            raise
        billed = reply.usage
        written = prompt + len(reply.body) // 4
        spent.tokens = written if billed is None else billed.prompt_tokens + billed.completion_tokens
        return reply


def _generated(body: bytes) -> Generated:
    try:
        choice: Any = json.loads(body)["choices"][0]
        text = choice["message"]["content"] or ""
        return Generated(text=str(text), whole=choice.get("finish_reason") == "stop")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UpstreamError("the backend answered with what is no chat completion") from error


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
    )
