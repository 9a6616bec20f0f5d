"""OpenAI's Responses API: POST /v1/responses, GET and DELETE /v1/responses/{id}. Answered by chat completions."""

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..prompt import BadRequest, PromptsluiceError, UpstreamError
from . import pipeline
from .backends.base import Answer
from .caller import Caller
from .deps import House, Known
from .house import Sluice
from .responses.events import as_events
from .responses.form import ResponsesRequest, read_request
from .responses.items import Message, messages_of
from .responses.kept import Kept
from .responses.output import Item, ResponseObject, output_of, spoken, usage_of
from .responses.translate import chat_body, rename_fields
from .stream import EventStream
from .wire import dumps, loads

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request, sluice: House, caller: Known) -> Response:
    """Answer, whole or as events. Any content type is read as JSON."""
    raw, depth = await request.body(), sluice.policy_set.server.max_depth
    asked = await sluice.readers.run(lambda: read_request(raw, max_depth=depth))
    previous = asked.previous_response_id
    earlier = [] if previous is None else sluice.rooms.responses.conversation(caller.tenant, previous)
    fresh, body = await sluice.readers.run(lambda: _translated(asked, earlier))
    response = ResponseObject(request=asked)

    def finished(output: Sequence[Item], whole: bytes) -> None:
        _keep(sluice, caller, response, [*fresh, spoken(output)], whole)

    try:
        reply = await pipeline.answer(sluice, body, caller)
        if isinstance(reply, Answer):
            answer = reply.body if reply.status >= 400 else _whole(reply.body, response, finished)
            return Response(answer, reply.status, dict(reply.headers), media_type="application/json")
        events = as_events(reply.frames, response, finished=finished, request_id=caller.request_id)
        return EventStream(events, headers=reply.headers, request_id=caller.request_id, end=b"")
    except PromptsluiceError as error:
        rename_fields(error)
        raise


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, sluice: House, caller: Known, response_id: str) -> Response:
    """A response that was kept."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise BadRequest("the events of a response are not kept; get it without stream", param="stream")
    return Response(sluice.rooms.responses.get(caller.tenant, response_id).response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(sluice: House, caller: Known, response_id: str) -> Response:
    """Forget a response, and with it how to continue it."""
    sluice.rooms.responses.delete(caller.tenant, response_id)
    body = {"id": response_id, "object": "response", "deleted": True}
    return Response(dumps(body), media_type="application/json")


def _translated(asked: ResponsesRequest, earlier: Sequence[bytes]) -> tuple[list[Message], bytes]:
    """The messages that this turn adds, and the chat completion with all of them."""
    before: list[Message] = [message for turn in earlier for message in json.loads(turn)]
    fresh = messages_of(asked.input, earlier=before)
    return fresh, chat_body(asked, [*before, *fresh])


def _whole(body: bytes, response: ResponseObject, finished: Any) -> bytes:
    """The response object for a chat completion's body."""
    try:
        completion = loads(body)
        choice = completion["choices"][0]
        response.finished(choice.get("finish_reason"))
        status = "incomplete" if response.reason else "completed"
        output = output_of(choice["message"], logprobs=choice.get("logprobs"), status=status)
        response.model = str(completion.get("model") or "")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UpstreamError("the backend answered with what is no chat completion") from error
    response.usage = usage_of(completion.get("usage"))
    response.report = completion.get("promptsluice")
    whole = dumps(response.to_wire(output))
    finished(output, whole)
    return whole


def _keep(sluice: Sluice, caller: Caller, response: ResponseObject, messages: Sequence[Message], whole: bytes) -> None:
    if response.request.store:
        kept = Kept(response=whole, messages=dumps(messages), previous=response.request.previous_response_id)
        sluice.rooms.responses.put(caller.tenant, response.id, kept)
