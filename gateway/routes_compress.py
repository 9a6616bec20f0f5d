"""POST /v1/compress: what a policy makes of a chat completion, and why; nothing is dispatched."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..policies import Decision
from ..prompt import Segment
from ..prompt.jsontext import member
from . import pipeline
from .backends.base import Backend
from .deps import House, Known
from .pipeline import Prepared
from .wire import dumps

router = APIRouter()


@router.post("/v1/compress")
async def compress(request: Request, sluice: House, caller: Known) -> Response:
    """The rewritten messages of a Chat Completions body, a line for each of its segments, and the report."""
    prompt = await pipeline.parse(sluice, await request.body())
    resolution = pipeline.match(sluice, prompt, caller)
    backend = sluice.backends[resolution.backend]
    await backend.available()
    prepared = await pipeline.prepare(sluice, prompt, resolution, tenant=caller.tenant, request_id=caller.request_id)
    body = await sluice.readers.run(lambda: _body(prepared, backend))
    return Response(body, headers=prepared.report.headers(), media_type="application/json")


def _body(prepared: Prepared, backend: Backend) -> bytes:
    """The messages are cut from the body as it would be sent, so that not even the text of a number changes."""
    decisions = {decision.segment: decision for decision in prepared.plan.decisions} if prepared.plan else {}
    head = {"object": "compression", "model": prepared.resolution.model, "changed": prepared.prompt.changed}
    rest = {
        "segments": [
            _line(segment, decisions.get(segment.id), backend.count_tokens) for segment in prepared.prompt.segments
        ],
        "promptsluice": prepared.report.to_wire(),
    }
    messages = member(prepared.prompt.render().decode(), "messages").encode()
    return dumps(head)[:-1] + b',"messages":' + messages + b"," + dumps(rest)[1:]


def _line(segment: Segment, decision: Decision | None, count: Any) -> dict[str, Any]:
    """One segment: where it is from, what was planned for it and why, and what it has become."""
    return {
        "path": list(segment.path),
        "role": segment.role,
        "kind": segment.kind,
        "source": segment.source,
        "original": segment.original,
        "text": segment.text,
        "tokens_before": count(segment.original) if segment.original else 0,
        "tokens_after": count(segment.text) if segment.text else 0,
        "action": "insert" if segment.original is None and decision is None else _action(decision),
        "uses": list(decision.uses) if decision else [],
        "reason": decision.reason if decision else "the policy changes nothing",
    }


def _action(decision: Decision | None) -> str:
    return decision.action if decision else "leave"
