"""POST /v1/compress: what a policy makes of a chat completion, and why; nothing is dispatched."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..prompt.jsontext import member
from . import pipeline
from .backends.base import Backend
from .deps import House, Known
from .pipeline import Prepared
from .segment_lines import segment_lines
from .wire import dumps

router = APIRouter()


@router.post("/v1/compress")
async def compress(request: Request, sluice: House, caller: Known) -> Response:
    """The rewritten messages of a Chat Completions body, a line for each of its segments, and the report."""
    prompt = await pipeline.parse(sluice, await request.body())
    resolution = pipeline.match(sluice, prompt, caller)
    backend = sluice.backends[resolution.backend]
    await backend.available()
    prepared = await pipeline.prepare(
        sluice,
        prompt,
        resolution,
        tenant=caller.tenant,
        request_id=caller.request_id,
        sent=False,
        ticket=caller.ticket,
    )
    body = await sluice.readers.run(lambda: _body(prepared, backend))
    return Response(body, headers=prepared.report.headers(), media_type="application/json")


def _body(prepared: Prepared, backend: Backend) -> bytes:
    """The messages are cut from the body as it would be sent, so that not even the text of a number changes."""
    head = {"object": "compression", "model": prepared.resolution.model, "changed": prepared.prompt.changed}
    rest = {
        "segments": segment_lines(prepared, backend.count_tokens),
        "promptsluice": prepared.report.to_wire(),
    }
    messages = member(prepared.prompt.render().decode(), "messages").encode()
    return dumps(head)[:-1] + b',"messages":' + messages + b"," + dumps(rest)[1:]
