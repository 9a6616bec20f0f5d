"""A request's way, top-down: parse, prepare (match, retrieve, plan, rewrite), dispatch, account. No HTTP in here.

A step of the optimizer that breaks or is late leaves the prompt as it was, and the report and a metric say so; where
the route says `on_failure: closed` the request ends there.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from ..compressors.result import LATE, Change
from ..policies import Plan, Resolution
from ..policies.keyring import require_collection
from ..policies.rollout import beginning
from ..prompt import (
    BadRequest,
    ModelUnavailable,
    Overloaded,
    PolicyNotApplied,
    Prompt,
    PromptsluiceError,
    Report,
    UpstreamTimeout,
)
from .accounts import Begun, ended, who, with_account
from .backends.base import Answer, Asked, Call, Stream, estimated_tokens
from .caller import Caller
from .edge import log
from .failover import Able, Ask, C, anyone, complete
from .house import Sluice
from .keys.spending import longest_answers, reserve
from .keys.ticket import Ticket
from .observed import afterwards, dispatched, entered, step
from .optimization import BUSY, Optimized, optimized, passed_over
from .recall import completed
from .recording import outcome_of, outline_of, recorded, show
from .records import Outline, Record
from .turns import scope_of

# Below this size a body is parsed faster than it is handed to a thread.
_LARGE_BODY = 256 * 1024
# Where a stream's frames go out as they are; elsewhere they become other events.
_UNREAD = frozenset({"/v1/chat/completions", "/v1/completions"})
# The optimizer's steps keep their own deadlines; this is for what hangs, or loads a model for the first time.
_OPTIMIZE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Begun):
    """A chat ready to be dispatched. `changes`: of each step that ran its name and what it did."""

    prompt: Prompt
    plan: Plan | None = None
    operation: str = "chat"
    changes: Sequence[tuple[str, Sequence[Change]]] = ()


async def answer(sluice: Sluice, raw: bytes, caller: Caller) -> Answer | Stream:
    """The whole way of one chat completion. Raises PromptsluiceError while nothing has been sent."""
    began = time.perf_counter()
    with recorded(sluice, caller) as record:
        prompt = await parse(sluice, raw)
        resolution = match(sluice, prompt, caller)
        await reserve_for(caller, prompt, resolution)
        await available(sluice, resolution.backend)
        prepared = await prepare(
            sluice,
            prompt,
            resolution,
            request_id=caller.request_id,
            tenant=caller.tenant,
            began=began,
            shadow=True,
            record=record,
            ticket=caller.ticket,
        )
    reply = await dispatch(sluice, prepared, caller)
    return with_account(sluice, prepared, reply, caller)


async def available(sluice: Sluice, backend: str) -> None:
    """Wait until the backend can answer. One that never will is an error here only where nobody stands in for it."""
    spec = sluice.policy_set.backends.get(backend)
    try:
        with step("admission"):
            await sluice.backends[backend].available()
    except ModelUnavailable:
        if spec is None or not spec.fallbacks:
            raise


async def parse(sluice: Sluice, raw: bytes) -> Prompt:
    """Bytes to a Prompt; a large body is read in a worker thread."""
    depth = sluice.policy_set.server.max_depth
    if len(raw) < _LARGE_BODY:
        return Prompt.from_body(raw, max_depth=depth)
    return await sluice.readers.run(lambda: Prompt.from_body(raw, max_depth=depth))


def check_routing_fields(body: Mapping[str, Any]) -> None:
    """The few fields that the gateway itself reads; all others belong to the backend."""
    model = body.get("model")
    if not isinstance(model, str) or not model.strip():
        raise BadRequest("model must be a non-empty string", param="model")
    if not isinstance(body.get("stream"), bool | None):
        raise BadRequest("stream must be true or false", param="stream")
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise BadRequest("stream_options must be an object", param="stream_options")
    if options and not isinstance(options.get("include_usage"), bool | None):
        raise BadRequest("include_usage must be true or false", param="stream_options.include_usage")


def match(sluice: Sluice, prompt: Prompt, caller: Caller) -> Resolution:
    """Which policy and which backend."""
    body = prompt.body
    check_routing_fields(body)
    with step("match"):
        resolution = sluice.policy_set.resolve(
            body["model"],
            headers=caller.headers,
            api_key=caller.api_key,
            prompt_tokens=lambda: estimated_prompt(prompt),
            conversation=lambda: beginning(prompt),
        )
    if resolution.policy.retrieve is not None:
        asks = f", which the policy {resolution.policy_name!r} asks"
        require_collection(caller.key, resolution.policy.retrieve.collection, by=asks)
    return resolution


async def reserve_for(caller: Caller, prompt: Prompt, resolution: Resolution) -> None:
    """Take what a chat may cost from the caller's limits, with what its policy may add to it; TokensLimited where there
    is no room for it.
    """
    retrieve = resolution.policy.retrieve
    added = 0 if retrieve is None else retrieve.max_tokens
    await reserve(
        caller.ticket,
        prompt=lambda: estimated_prompt(prompt),
        output=lambda: longest_answers(prompt.body) + added,
    )


def estimated_prompt(prompt: Prompt) -> int:
    """About how many tokens a prompt has."""
    return sum(estimated_tokens(segment.text) for segment in prompt.segments)


async def prepare(
    sluice: Sluice,
    prompt: Prompt,
    resolution: Resolution,
    *,
    tenant: str,
    request_id: str = "",
    began: float | None = None,
    shadow: bool = False,
    sent: bool = True,
    record: Record | None = None,
    ticket: Ticket | None = None,
) -> Prepared:
    """Rewrite the prompt by its policy, in a worker thread; what is late or breaks leaves it as it was. What is kept of
    it is kept for `tenant`; `ticket` is charged for models that are asked on the side.

    PolicyNotApplied instead, where the route is closed on failures. `shadow`: begin to carry out the policy that the
    route wants to see, too. `sent`: what it becomes will be sent, so that later turns have to begin like it.
    """
    start = time.perf_counter()
    report = Report(
        policy=resolution.policy_name,
        backend=resolution.backend,
        reason=resolution.reason,
        rollout=resolution.rollout,
        group=resolution.group or "",
    )
    outcome = Optimized(prompt=prompt)
    if record is not None:
        record.matched(resolution, report, stream=bool(prompt.body.get("stream")))
    if resolution.policy.passthrough:
        outcome.tokens_in = estimated_prompt(prompt)
        afterwards(lambda: show(record, outcome, outline_of(sluice, record, outcome)))
    else:
        outcome = await _optimized(
            sluice, prompt, resolution, tenant=tenant, request_id=request_id, sent=sent, record=record, ticket=ticket
        )
    outcome.report_to(report)
    report.overhead_ms = (time.perf_counter() - start) * 1000
    planned = copy(report)  # the backend makes its sizes exact
    afterwards(lambda: sluice.metrics.prepared(planned))
    prepared = Prepared(
        prompt=outcome.prompt,
        resolution=resolution,
        plan=outcome.plan,
        changes=outcome.changes,
        report=report,
        began=start if began is None else began,
        record=record,
    )
    if report.failed and resolution.fail_closed:
        error = not_applied(report)
        ended(sluice, prepared, outcome="failed", error=error)
        raise error
    if report.rollout:
        log.info("request %s: rollout %s, group %s, policy %s", request_id, report.rollout, report.group, report.policy)
    if shadow:
        report.shadow = sluice.shadows.begin(sluice, prompt, resolution, tenant=tenant, request_id=request_id)
    return prepared


def not_applied(report: Report) -> PolicyNotApplied:
    """The error where a route is closed on failures. What was late may be in time when it is tried again."""
    steps = ", ".join(f"{step}: {why}" for step, why in report.failed.items())
    hopeless = any(why not in (LATE, BUSY) for why in report.failed.values())
    return PolicyNotApplied(
        f"the policy {report.policy} could not be carried out ({steps}), and this route sends nothing without it",
        headers={**report.headers(), **({"x-should-retry": "false"} if hopeless else {})},
    )


async def _optimized(
    sluice: Sluice,
    prompt: Prompt,
    resolution: Resolution,
    *,
    tenant: str,
    request_id: str,
    sent: bool,
    record: Record | None,
    ticket: Ticket | None,
) -> Optimized:
    tools = sluice.tools_for(tenant, resolution.backend, request_id=request_id, ticket=ticket)
    policy = resolution.policy
    scope = scope_of("request", tenant, resolution.backend, policy)

    awaited = threading.Event()
    if sent:
        awaited.set()

    def work() -> tuple[Optimized, Outline | None]:
        closed = resolution.fail_closed
        outcome = optimized(
            prompt, policy, tools, request_id=request_id, scope=scope, fail_closed=closed, wanted=awaited.is_set
        )
        return outcome, outline_of(sluice, record, outcome)

    try:
        outcome, outline = await sluice.optimizers.run(
            work,
            timeout_s=max(_OPTIMIZE_S, policy.rewrite_timeout or 0),
        )
    except (TimeoutError, Overloaded) as error:
        awaited.clear()
        late = isinstance(error, TimeoutError)
        outcome = passed_over(prompt, reason="late" if late else "no free worker", why=LATE if late else BUSY)
        outline = outline_of(sluice, record, outcome)
    show(record, outcome, outline)
    return outcome


async def dispatch(sluice: Sluice, prepared: Prepared, caller: Caller) -> Answer | Stream:
    """Hand the prompt to its backend."""
    call = Call(
        prompt=prepared.prompt,
        policy=prepared.resolution.policy,
        plan=prepared.plan,
        **asked(prepared, prepared.prompt.body, caller),
    )
    return await replied(
        sluice, prepared, call, ask=lambda backend, one: completed(sluice, backend, one), ticket=caller.ticket
    )


def asked(begun: Begun, body: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """The fields that all calls have."""
    options = body.get("stream_options") or {}
    return {
        "model": begun.resolution.model,
        "report": begun.report,
        "request_id": caller.request_id,
        "stream": bool(body.get("stream")),
        "include_usage": bool(options.get("include_usage")),
        "charged": caller.ticket is not None and caller.ticket.counts_tokens,
        "tenant": caller.tenant,
        "headers": caller.forwarded,
        "arrived": begun.began,
        "unread": caller.path in _UNREAD and not caller.wants_report and begun.resolution.policy.cache is None,
    }


async def replied(
    sluice: Sluice,
    prepared: Begun,
    call: C,
    *,
    ask: Ask[C],
    able: Able = anyone,
    ticket: Ticket | None,
    prompt_tokens: int | None = None,
) -> Answer | Stream:
    """The reply of the backend or of a fallback that is able; an end without one is entered in the books.

    `prompt_tokens`: about how many there are, where the report does not say.
    """
    reading = call.reading

    def pay() -> None:
        """Whoever was given the prompt reads it, though nobody waits for the answer any more."""
        if ticket is not None and reading.begun:
            ticket.settle(None, estimate=prepared.report.tokens_out if prompt_tokens is None else prompt_tokens)

    try:
        if traced := _dispatched(sluice, prepared, call):
            call = replace(call, headers={**call.headers, **traced})
        async with asyncio.timeout(sluice.policy_set.server.request_timeout):
            return await complete(sluice, call, backend=prepared.resolution.backend, ask=ask, able=able)
    except TimeoutError as error:
        late = UpstreamTimeout("the request took longer than the server allows")
        ended(sluice, prepared, outcome="failed", error=late)
        pay()
        raise late from error
    except PromptsluiceError as error:
        if isinstance(error, UpstreamTimeout):
            pay()
        entered(error=error.code or error.type)
        ended(sluice, prepared, outcome=outcome_of(error.status), error=error)
        error.headers.update(prepared.report.headers())
        raise
    except asyncio.CancelledError:
        ended(sluice, prepared, outcome="cancelled")
        pay()
        raise
    except Exception:
        ended(sluice, prepared, outcome="failed")
        raise


def _dispatched(sluice: Sluice, prepared: Begun, call: Asked) -> Mapping[str, str]:
    """Headers that tell an upstream of this request's trace, where there is one."""
    return dispatched(*who(sluice, prepared), stream=call.stream)
