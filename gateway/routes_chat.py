"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from . import pipeline
from .backends.base import Answer
from .deps import House, Known
from .stream import EventStream

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, sluice: House, caller: Known) -> Response:
    """Answer a chat completion, whole or streamed. Any content type is read as JSON."""
    reply = await pipeline.answer(sluice, await request.body(), caller)
    if isinstance(reply, Answer):
        return Response(reply.body, reply.status, dict(reply.headers), media_type="application/json")
    return EventStream(reply.frames, headers=reply.headers, request_id=caller.request_id)
