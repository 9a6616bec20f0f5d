"""Runs of one script in a Redis server, sent together: what is asked while a batch is on its way is the next batch.

So a burst of requests costs a few round trips on one connection, and not a connection for each of them.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha1
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redis.asyncio import Redis

_MOST = 256  # runs a batch: the server does nothing else meanwhile
Run = tuple[Sequence[str], Sequence[str | float]]


class Batches:
    """`run` gives what the script returns, or raises what became of its batch."""

    def __init__(self, client: "Redis", script: str) -> None:
        self._client, self._script = client, script
        self._digest = sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._waiting: list[tuple[Run, asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    def run(self, keys: Sequence[str], arguments: Sequence[str | float]) -> "asyncio.Future[Any]":
        """Queued at once, and carried out whether somebody waits for it or not."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((keys, arguments), answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return answer

    async def close(self) -> None:
        """Return when all that was asked for is answered."""
        while self._sending is not None:
            await asyncio.wait({self._sending})

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                for (_, answer), result in zip(batch, await self._answers([run for run, _ in batch]), strict=True):
                    if answer.done():
                        continue
                    if isinstance(result, Exception):
                        answer.set_exception(result)
                        answer.exception()  # looked at: not everybody waits
                    else:
                        answer.set_result(result)
        finally:
            self._sending = None

    async def _answers(self, runs: Sequence[Run]) -> Sequence[Any]:
        from redis.exceptions import NoScriptError

        try:
            answers = await self._executed(runs)
            unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if unknown:  # the server is new, or was started again
                await self._client.script_load(self._script)
                again = await self._executed([runs[at] for at in unknown])
                for at, answer in zip(unknown, again, strict=True):
                    answers[at] = answer
        except Exception as error:  # noqa: BLE001 - the client's, the network's and the server's own: told to all
            return [error] * len(runs)
        return answers

    async def _executed(self, runs: Sequence[Run]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for keys, arguments in runs:
            pipeline.evalsha(self._digest, len(keys), *keys, *arguments)
        return await pipeline.execute(raise_on_error=False)
