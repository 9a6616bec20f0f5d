"""Stored KV for one chat on an engine: looked up where it may pay, taken where it is faster, told in the report.

Blocking; imports torch.
"""

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from ...backend_engine.types import Result
from ...kv_reuse.blend import SpanHit
from ...kv_reuse.controller import Choice, Way
from ...prompt import KVSpan, Prompt, Segment, StepReport
from ..salts import Salts
from .background import Background, Lesson
from .base import Call
from .engine_room import EngineRoom, Tokens
from .generations import reused_segments
from .reuse_control import Decided
from .reusing import Reused, reused

_PATIENCE_S = 10.0  # that learning waits for idle time

Learn = Callable[[Result], None]


class _Lesson(NamedTuple):
    """A job, whether it is to be done without idle time, too, and short names of the chunks that it computes.

    `better`: these are stored already, and only who is served with them needs better ones.
    """

    job: Callable[[], object]
    anyway: bool
    about: frozenset[bytes]
    better: bool = False


def decided(
    room: EngineRoom, call: Call, tokens: Tokens, *, salts: Salts, background: Background
) -> tuple[Decided | None, Learn]:
    """Look up what is stored where that may pay, and take what is fastest; None where nothing may be gained.

    Also how to count what came, and to have computed in the background what is missing, or could be better, for next
    time: to be called with the request's result when it has ended, for it would share the engine's steps with it.
    """
    began = time.perf_counter()
    own, retrieve, ids = salts.tenant(call.tenant), call.policy.retrieve, tokens.encoded.ids
    about = {"tenant": call.tenant, "collection": "" if retrieve is None else retrieve.collection}
    blending = room.control.blending(call.policy, about["collection"])
    exact = room.service.known_tokens(ids, namespace=call.tenant)
    known = room.service.known_tokens(ids, namespace=call.tenant, blending=blending)
    found = reused(
        room,
        call.prompt,
        tokens,
        call.policy.reuse,
        chunks=reused_segments(call.plan),
        salt=partial(_salt, salts, call),
        own=own,
        prefix=known,
        promising=lambda places: room.control.promising(ids, places, call.policy, **about),
    )
    learn = partial(_for_next_time, room, background, replace(found, reuse=None), _lessons(room, call, found, own))
    if not found.wanted and known <= exact:
        return None, learn
    if not found.looked_up and known <= exact:
        call.report.steps.append(_step("untouched", tokens, began, note="stored KV would gain nothing"))
        return None, learn
    if not found.sought:
        room.control.loaded(found.hits, wanted=found.wanted, seconds=time.perf_counter() - began)
    taken = room.control.decided(ids, found.hits, found.reuse, call.policy, **about, again=found.again)
    if taken.blending is not None:
        call.report.tiers.update(taken.tiers)
        call.report.kv_spans += _places(tokens, found.hits)
    note = f"{found.note}; {taken.note}"
    call.report.steps.append(_step(taken.choice.way, tokens, began, note=note, choice=taken.choice))
    return taken, learn


def _lessons(room: EngineRoom, call: Call, found: Reused, own: str) -> list[_Lesson]:
    """What to compute for next time. What is asked for again, or belongs to a collection, is computed even where the
    engine finds no idle time; what would only be better, and a client's text that may never come again, are not. Nor is
    what was deleted since the request arrived: it may have been retrieved, or sent, before that."""
    lessons: list[_Lesson] = []
    for salt, plan in found.plans:
        for wanted, better in ((plan.misses, False), (plan.poorer, True)):
            for anchor, chunks in plan.by_anchor(wanted).items():
                warm = partial(room.reuser.warm, chunks, anchor=anchor, salt=salt, wanted=call.arrived)
                lessons.append(_Lesson(warm, not better, _names(chunks, salt, _digest(anchor)), better))
    if found.rewritten:
        lessons.append(_Lesson(partial(_learn_originals, room, call, own), False, frozenset()))
    elif found.fresh.chunks:
        warm = partial(room.reuser.warm, found.fresh.chunks, salt=own, wanted=call.arrived)
        lessons.append(_Lesson(warm, False, _names(found.fresh.chunks, own, b"")))
    return lessons


def _for_next_time(
    room: EngineRoom, background: Background, found: Reused, lessons: Sequence[_Lesson], result: Result
) -> None:
    """On an event loop, so that it reads no tokens."""
    ran = result.reused_tokens + result.recomputed_tokens > 0  # else another way was taken
    if ran:
        for _, plan in found.plans:
            room.reuser.saw(plan)
    if not found.rewritten:
        room.reuser.finder.saw(found.fresh.sights)
    until, idle = time.monotonic() + _PATIENCE_S, lambda: room.service.idle
    for one in lessons:
        if one.better and not ran:
            continue
        background.learn(Lesson(job=one.job, idle=idle, until=until, anyway=one.anyway, about=one.about))
    if room.reuser.finder.stale(found.own):
        background.run(partial(room.reuser.finder.sync, found.own))


def _names(chunks: Sequence[Sequence[int]], salt: str, anchor: bytes) -> frozenset[bytes]:
    return frozenset(_digest(chunk, salt.encode(), anchor) for chunk in chunks)


def _digest(ids: Sequence[int], *more: bytes) -> bytes:
    return blake2b(array("q", ids).tobytes() + b"".join(more), digest_size=16).digest()


def _learn_originals(room: EngineRoom, call: Call, own: str) -> None:
    """Compute what is new in a rewritten prompt as it came: what was chosen of documents for one question will not come
    again, the documents may."""
    fields = {name: call.prompt.body[name] for name in ("tools",) if name in call.prompt.body}
    came = Prompt.from_messages(call.prompt.arrived, **fields)
    tokens = room.encode(came, chunks=frozenset(), with_tools=call.prompt.body.get("tool_choice") != "none")
    found = reused(
        room,
        came,
        tokens,
        call.policy.reuse,
        chunks=frozenset(),
        salt=lambda segment: own,
        own=own,
        prefix=room.service.known_tokens(tokens.encoded.ids, namespace=call.tenant),
        promising=lambda places: False,
    )
    room.reuser.finder.saw(found.fresh.sights)
    room.reuser.warm(found.fresh.chunks, salt=own, wanted=call.arrived)


def _salt(salts: Salts, call: Call, segment: Segment) -> str:
    retrieve = call.policy.retrieve
    if segment.original is None and retrieve is not None:
        return salts.retrieved(retrieve.collection, tenant=call.tenant)
    return salts.tenant(call.tenant)


def _places(tokens: Tokens, hits: Sequence[SpanHit]) -> list[KVSpan]:
    """Where the hits stand; of those that are a part of a marked chunk also in which segment."""
    chunks = sorted((start, start + length, tokens.segments[mark].id) for start, length, mark in tokens.encoded.spans)
    places: list[KVSpan] = []
    for hit in hits:
        at = bisect_right(chunks, hit.start, key=lambda chunk: chunk[0]) - 1
        inside = at >= 0 and hit.start + hit.tokens <= chunks[at][1]
        places.append(
            KVSpan(start=hit.start, tokens=hit.tokens, tier=hit.tier, segment=chunks[at][2] if inside else None)
        )
    return places


def _step(name: str, tokens: Tokens, began: float, *, note: str, choice: Choice | None = None) -> StepReport:
    size, predicted, saved = len(tokens.encoded.ids), None if choice is None else choice.seconds, None
    if choice is not None and choice.way in (Way.REUSE, Way.BLEND) and choice.seconds and choice.full_seconds:
        saved = 1000 * (choice.full_seconds - choice.seconds)
    return StepReport(
        name=name,
        ms=(time.perf_counter() - began) * 1000,
        tokens_before=size,
        tokens_after=size,
        predicted_ms=None if predicted is None else 1000 * predicted,
        saved_ms=saved,
        note=note,
    )
