"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

import time
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..policies import Plan
from ..prompt import BadRequest, Prompt, Report
from ..prompt.jsontext import decode_text, parse
from . import pipeline
from .accounts import Begun, with_account
from .backends.base import Answer, Backend, MessagesCall, Stream
from .caller import Caller
from .deps import House, Known
from .house import Sluice
from .messages.answer import as_message
from .messages.request import ChatBody, chat_body
from .messages.stream import as_message_stream, with_last_words
from .recall import completed
from .recording import recorded
from .stream import EventStream
from .wire import dumps

router = APIRouter()
# What goes to an upstream that speaks the API itself, beside what goes to all upstreams.
_FORWARDED = ("anthropic-version", "anthropic-beta")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A body as it came, and what it says as a chat."""

    raw: bytes
    chat: ChatBody
    prompt: Prompt


@router.post("/v1/messages")
async def create_message(request: Request, sluice: House, caller: Known) -> Response:
    """Answer, whole or as events. Any content type is read as JSON."""
    began = time.perf_counter()
    with recorded(sluice, caller) as record:
        asked = await _read(sluice, await request.body())
        resolution = pipeline.match(sluice, asked.prompt, caller)
        await pipeline.reserve_for(caller, asked.prompt, resolution)
        await pipeline.available(sluice, resolution.backend)
        prepared = await pipeline.prepare(
            sluice,
            asked.prompt,
            resolution,
            request_id=caller.request_id,
            tenant=caller.tenant,
            began=began,
            shadow=True,
            record=record,
            ticket=caller.ticket,
        )
    call = _call(asked, prepared, caller, prompt=prepared.prompt, plan=prepared.plan)
    reply = await pipeline.replied(
        sluice,
        prepared,
        call,
        ask=lambda backend, one: _ask(sluice, backend, one, asked.chat),
        ticket=caller.ticket,
    )
    reply = with_account(sluice, prepared, reply, caller)
    headers = {**reply.headers, "request-id": caller.request_id}
    if isinstance(reply, Answer):
        return Response(reply.body, reply.status, headers, media_type="application/json")
    frames = with_last_words(reply.frames, request_id=caller.request_id)
    return EventStream(frames, headers=headers, request_id=caller.request_id, end=b"")


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, sluice: House, caller: Known) -> Response:
    """How many tokens the messages have, tools and all. No policy is applied."""
    began = time.perf_counter()
    asked = await _read(sluice, await request.body(), counting=True)
    resolution = pipeline.match(sluice, asked.prompt, caller)
    await pipeline.available(sluice, resolution.backend)
    backend = sluice.backends[resolution.backend]
    if not backend.speaks_messages:
        asked.chat.refuse()
        tokens = await sluice.readers.run(lambda: backend.count_prompt(asked.prompt))
        return Response(dumps({"input_tokens": tokens}), media_type="application/json")
    begun = Begun(resolution=resolution, report=Report(), began=began)
    reply = await backend.converse(_call(asked, begun, caller, prompt=asked.prompt, path="/messages/count_tokens"))
    assert isinstance(reply, Answer), "nothing was asked to be streamed"
    return Response(reply.body, reply.status, dict(reply.headers), media_type="application/json")


async def _read(sluice: Sluice, raw: bytes, *, counting: bool = False) -> _Asked:
    depth = sluice.policy_set.server.max_depth
    return await sluice.readers.run(lambda: _parsed(raw, depth, counting))


def _parsed(raw: bytes, max_depth: int, counting: bool) -> _Asked:
    body = parse(decode_text(raw), max_depth=max_depth)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    pipeline.check_routing_fields(body)
    if counting:
        body = {"max_tokens": 1, **body}
    chat = chat_body(body)
    fields = {name: value for name, value in chat.body.items() if name != "messages"}
    return _Asked(raw=raw, chat=chat, prompt=Prompt.from_messages(chat.body["messages"], **fields))


def _call(
    asked: _Asked,
    begun: Begun,
    caller: Caller,
    *,
    prompt: Prompt,
    plan: Plan | None = None,
    path: str = "/messages",
) -> MessagesCall:
    return MessagesCall(
        raw=asked.raw,
        origins=asked.chat.origins,
        versions={name: caller.headers[name] for name in _FORWARDED if name in caller.headers},
        path=path,
        prompt=prompt,
        policy=begun.resolution.policy,
        plan=plan,
        **pipeline.asked(begun, prompt.body if path == "/messages" else {}, caller),
    )


async def _ask(sluice: Sluice, backend: Backend, call: MessagesCall, chat: ChatBody) -> Answer | Stream:
    """The reply of one backend in Anthropic's form, whatever it speaks itself."""
    if backend.speaks_messages:
        return await backend.converse(call)
    chat.refuse()
    stops = chat.body.get("stop") or ()
    reply = await completed(sluice, backend, call)
    if isinstance(reply, Answer):
        return as_message(reply, stops=stops)
    return as_message_stream(reply, input_tokens=call.report.tokens_out, stops=stops)
