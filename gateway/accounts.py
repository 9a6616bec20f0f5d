"""The books of requests: who they are for metrics and traces, when they began to be answered, how they ended."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from ..policies import Resolution
from ..prompt import PromptsluiceError, Report, UpstreamTimeout, Usage
from .backends.base import Answer, Frame, Stream
from .caller import Caller
from .house import Sluice
from .keys.spending import Written
from .keys.ticket import Ticket
from .observed import afterwards, finished, first_token
from .observed import replied as answered
from .recall import HEADER as RECALLED
from .recording import outcome_of
from .records import Record
from .wire import spliced

_KNOWN_AT_THE_END = ("cached", "loaded", "blended", "reused", "recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A request whose books are kept. `began` is the reading of time.perf_counter when it arrived; `record` is what the
    page shows of it."""

    resolution: Resolution
    report: Report
    began: float
    record: Record | None = None
    operation: str = "text_completion"
    """What it is, by its name in OpenTelemetry's conventions for generative AI."""


def who(sluice: Sluice, prepared: Begun) -> tuple[str, str, str]:
    """Operation, provider and model, as the conventions for generative AI name them."""
    spec = sluice.policy_set.backends.get(prepared.report.backend or prepared.resolution.backend)
    provider = "openai" if spec is not None and spec.kind == "openai" else "promptsluice"
    return prepared.operation, provider, sluice.metrics.known(prepared.resolution.model)


def with_account(sluice: Sluice, prepared: Begun, reply: Answer | Stream, caller: Caller) -> Answer | Stream:
    """The same reply with its headers, its entry in the metrics and, where asked for, its report."""
    headers = {**reply.headers, **prepared.report.headers()}
    wanted = caller.wants_report
    ticket = None if headers.get(RECALLED) == "hit" else caller.ticket  # which costs nothing
    answered(stream=isinstance(reply, Stream))
    status = reply.status if isinstance(reply, Answer) else 200
    if prepared.record is not None:
        prepared.record.headers, prepared.record.status = reply.headers, status
    if isinstance(reply, Stream):
        return Stream(frames=_accounted(sluice, prepared, reply, report=wanted, ticket=ticket), headers=headers)
    ok = status < 400
    if ok and ticket is not None:
        ticket.settle(reply.usage, estimate=prepared.report.tokens_out + len(reply.body) // 4)
    ended(sluice, prepared, outcome=outcome_of(status), usage=reply.usage)
    # A streamed answer's headers are gone before the engine knows these.
    headers |= {f"x-promptsluice-tokens-{name}": str(getattr(prepared.report, name)) for name in _KNOWN_AT_THE_END}
    body = spliced(reply.body, "promptsluice", prepared.report.to_wire()) if wanted and ok else reply.body
    return Answer(body=body, status=reply.status, headers=headers, usage=reply.usage)


async def _accounted(
    sluice: Sluice, prepared: Begun, reply: Stream, *, report: bool, ticket: Ticket | None
) -> AsyncGenerator[Frame, None]:
    """Pass the frames on and keep the books: first token, usage, how it ended. The report rides on the last frame."""
    outcome = "cancelled"
    usage: Usage | None = None
    written = Written()
    began_at = 0.0
    broken: Exception | None = None
    held: Frame | None = None
    try:
        async with aclosing(reply.frames) as frames:
            async for item in frames:
                usage = item.usage or usage
                if item.content:
                    if not written.tokens:
                        _first_token(sluice, prepared)
                        began_at = time.perf_counter()
                    written.add(item.content, events=item.events)
                if item.failed:
                    outcome = "failed"
                if held is not None and item.data:
                    yield held
                    held = None
                if report and item.data and not item.failed:
                    held = replace(item, more=False)  # the next one may be long in coming
                else:
                    yield item
        if held is not None:
            yield replace(held, data=spliced(held.data, "promptsluice", prepared.report.to_wire()), usage=None)
        outcome = "ok" if outcome != "failed" else outcome
        if written.tokens and outcome == "ok" and reply.asked_at is not None:
            _learned(sluice, prepared, began_at - reply.asked_at, usage)
    except Exception as error:
        outcome, broken = "failed", error
        if held is not None:
            yield held
        raise
    finally:
        ended(sluice, prepared, outcome=outcome, usage=usage, error=broken)
        # Who leaves pays for the prompt, which was read for him, and for what was written until then; so does who asks
        # for more than can come in time.
        read = outcome != "failed" or isinstance(broken, UpstreamTimeout)
        if ticket is not None and (usage is not None or written.tokens or read):
            ticket.settle(usage, estimate=prepared.report.tokens_out + written.tokens)


def _first_token(sluice: Sluice, prepared: Begun) -> None:
    """Enter it in the books; in the metrics when it is on its way, and not only at the end of a long stream."""
    seconds = time.perf_counter() - prepared.began

    def entered() -> None:
        sluice.metrics.first_token(prepared.resolution.model, prepared.report, seconds)
        sluice.metrics.genai.first_token(who(sluice, prepared), seconds)

    asyncio.get_running_loop().call_soon(entered)
    first_token(seconds)
    if prepared.record is not None:
        prepared.record.ttft_s = seconds


def _learned(sluice: Sluice, prepared: Begun, waited_s: float, usage: Usage | None) -> None:
    """Tell a backend that measures nothing itself how long it took to its first token, for the tokens not cached.
    `waited_s` are the seconds since it was asked, without what passed before.

    An answer that was given again brings no usage, and says nothing of the backend.
    """
    backend = sluice.backends.get(prepared.report.backend)
    if usage is not None and backend is not None and backend.prefill_cost() is None:
        fresh = usage.prompt_tokens - usage.cached_tokens
        backend.ledger.ran("prefill", tokens=fresh, ms=1000 * waited_s)


def ended(
    sluice: Sluice, prepared: Begun, *, outcome: str, usage: Usage | None = None, error: Exception | None = None
) -> None:
    """Enter in all books how a request ended: ok, failed, refused, cancelled."""
    model, report = prepared.resolution.model, prepared.report
    seconds = time.perf_counter() - prepared.began
    if prepared.record is not None:
        prepared.record.ended(outcome)  # it is nobody else's to end any more
        if isinstance(error, PromptsluiceError):
            prepared.record.failed(error)

    def entered() -> None:
        sluice.metrics.finished(model, report, outcome=outcome, usage=usage)
        sluice.metrics.genai.finished(who(sluice, prepared), outcome=outcome, seconds=seconds, usage=usage)
        if prepared.record is not None:
            sluice.rooms.records.finished(prepared.record, usage=usage)

    afterwards(entered)
    finished(report, model=sluice.metrics.known(model), outcome=outcome, usage=usage)
