"""POST /v1/completions, the legacy route of raw prompts. A prompt without segments has nothing that a policy could
choose from, so none is applied, where that is allowed; the headers say `off`.
"""

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..policies import Resolution
from ..policies.keyring import require_policy
from ..prompt import BadRequest, Report
from ..prompt.jsontext import decode_text, parse
from .accounts import Begun, with_account
from .backends.base import Answer, Stream, TextCall, estimated_tokens
from .caller import Caller
from .deps import House, Known
from .house import Sluice
from .keys.spending import longest_answers, reserve
from .pipeline import asked, available, check_routing_fields, replied
from .recording import recorded
from .stream import EventStream

router = APIRouter()
_OFF = "off"


@router.post("/v1/completions")
async def completions(request: Request, sluice: House, caller: Known) -> Response:
    """Go on where prompts end, whole or streamed. Any content type is read as JSON."""
    reply = await _answer(sluice, await request.body(), caller)
    if isinstance(reply, Answer):
        return Response(reply.body, reply.status, dict(reply.headers), media_type="application/json")
    return EventStream(reply.frames, headers=reply.headers, request_id=caller.request_id)


async def _answer(sluice: Sluice, raw: bytes, caller: Caller) -> Answer | Stream:
    began = time.perf_counter()
    with recorded(sluice, caller) as record:
        body, tokens = await sluice.readers.run(lambda: _read(raw, max_depth=sluice.policy_set.server.max_depth))
        resolution = sluice.policy_set.resolve(
            body["model"], headers=caller.headers, api_key=caller.api_key, prompt_tokens=lambda: tokens
        )
        _require_that_none_is_needed(resolution, caller)
        prompts = _number_of(body.get("prompt"))
        await reserve(caller.ticket, prompt=lambda: tokens, output=lambda: longest_answers(body, prompts=prompts))
        await available(sluice, resolution.backend)
    reason = "a raw prompt has no segments"
    report = Report(policy=_OFF, backend=resolution.backend, reason=reason, tokens_in=tokens, tokens_out=tokens)
    record.matched(resolution, report, stream=bool(body.get("stream")))
    begun = Begun(resolution=resolution, report=report, began=began, record=record)
    call = TextCall(raw=raw, body=body, **asked(begun, body, caller))
    reply = await replied(
        sluice, begun, call, ask=lambda backend, one: backend.continue_text(one), ticket=caller.ticket
    )
    return with_account(sluice, begun, reply, caller)


def _require_that_none_is_needed(resolution: Resolution, caller: Caller) -> None:
    """A policy that would do something cannot be carried out here. BadRequest where its route sends nothing without it,
    Forbidden where the key may not go without.
    """
    if resolution.policy.passthrough:
        return
    name = resolution.policy_name
    if resolution.fail_closed:
        message = f"this route sends nothing without the policy {name!r}, which cannot be carried out on a raw prompt"
        raise BadRequest(f"{message}; send a chat to /v1/chat/completions", param="prompt", code="policy_not_applied")
    require_policy(caller.key, _OFF, why=f"; on a raw prompt {name!r} cannot be carried out")


def _read(raw: bytes, *, max_depth: int) -> tuple[Mapping[str, Any], int]:
    """The body, and about how many tokens its prompts have."""
    body = parse(decode_text(raw), max_depth=max_depth)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    check_routing_fields(body)
    return body, _estimated(body.get("prompt"))


def _estimated(prompt: Any) -> int:
    """Of ids, their number; what is no prompt has no tokens."""
    if isinstance(prompt, str):
        return estimated_tokens(prompt)
    return sum(1 if isinstance(one, int) else _estimated(one) for one in prompt) if isinstance(prompt, list) else 0


def _number_of(prompt: Any) -> int:
    """How many prompts there are: each is answered by itself. Ids are together one."""
    return sum(not isinstance(one, int) for one in prompt) if isinstance(prompt, list) else 1
