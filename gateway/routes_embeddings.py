"""POST /v1/embeddings: the house's own embedder by its name; any other model is passed on to its upstream."""

import base64
import json
import time
from collections.abc import Awaitable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator
from starlette.responses import Response

from ..policies.keyring import require_model
from ..prompt import BadRequest, ContextTooLong, Report, Usage
from ..prompt.jsontext import decode_text, parse, splice
from .accounts import Begun, with_account
from .backends.base import Answer, Asked, Backend
from .bodies import MAX_DEPTH, Body, read_body
from .caller import Caller
from .deps import House, Known
from .house import Sluice
from .keys.spending import reserve
from .pipeline import asked, check_routing_fields, replied
from .wire import dumps

router = APIRouter()
MAX_INPUTS = 2048
# Texts that are embedded before the next look at whether the client is still there.
_BATCH = 64

Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class Embeddings(Body):
    """`input`: a text, texts, the ids of a text in the embedder's vocabulary, or several of these."""

    model: str
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None

    @field_validator("input", mode="wrap")
    @classmethod
    def _one_complaint(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Not one for each form that it could have had."""
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(
                f"must be a text, up to {MAX_INPUTS} texts, a list of token ids or up to {MAX_INPUTS} such lists; "
                "none of them empty"
            ) from None


@router.post("/v1/embeddings")
async def embeddings(request: Request, sluice: House, caller: Known) -> Response:
    """A vector of length 1 for each input. A text that is longer than the embedder reads is an error, never cut."""
    raw = await request.body()
    model = await sluice.readers.run(lambda: _model(raw))
    await reserve(caller.ticket, prompt=lambda: len(raw) // 4)
    if model != sluice.policy_set.models.embedder:
        return await _passed_on(sluice, model, raw, caller)
    require_model(caller.key, model)
    body = await sluice.readers.run(lambda: read_body(raw, Embeddings))
    texts, tokens = await sluice.librarians.run(lambda: _texts(sluice, body))
    if caller.ticket is not None:
        caller.ticket.settle(Usage(prompt_tokens=tokens), estimate=tokens)
    vectors: list[NDArray[np.float32]] = []
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        vectors += [*await sluice.librarians.run(lambda batch=batch: sluice.rooms.embed(batch))]
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _wire(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return Response(await sluice.readers.run(lambda: dumps(answer)), media_type="application/json")


async def _passed_on(sluice: Sluice, model: str, raw: bytes, caller: Caller) -> Response:
    """To the upstream that serves the model, or to a fallback of it; the body goes as it came, but for the model's name
    where that is another one there, or has a policy's name behind it.
    """
    began = time.perf_counter()
    resolution = sluice.policy_set.resolve(model, headers=caller.headers, api_key=caller.api_key)
    report = Report(policy="off", backend=resolution.backend, reason="embeddings are not rewritten")
    begun = Begun(resolution=resolution, report=report, began=began, operation="embeddings")

    def ask(backend: Backend, call: Asked) -> Awaitable[Answer]:
        named = json.dumps(call.model)
        body = raw if call.model == model else splice(raw.decode(), replace={("model",): named}).encode()
        return backend.relay(
            "/embeddings", body, headers=call.headers, request_id=call.request_id, reading=call.reading
        )

    call = Asked(**asked(begun, {}, caller))
    size = len(raw) // 4
    reply = await replied(
        sluice,
        begun,
        call,
        ask=ask,
        able=lambda backend: backend.relays,
        ticket=caller.ticket,
        prompt_tokens=size,
    )
    reply = with_account(sluice, begun, reply, caller)
    assert isinstance(reply, Answer), "nothing was asked to be streamed"
    if caller.ticket is not None and reply.status < 400 and reply.usage is None:
        caller.ticket.settle(None, estimate=size)  # not by the size of the vectors
    return Response(reply.body, reply.status, dict(reply.headers), media_type="application/json")


def _model(raw: bytes) -> str:
    body = parse(decode_text(raw), max_depth=MAX_DEPTH)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    check_routing_fields(body)
    return body["model"]


def _texts(sluice: Sluice, body: Embeddings) -> tuple[list[str], int]:
    """The inputs as texts, all of them short enough, and their tokens."""
    embedder = sluice.rooms.embedder()
    if body.dimensions not in (None, embedder.dim):
        raise BadRequest(
            f"dimensions must be {embedder.dim} or absent: {body.model} cannot shorten its vectors", param="dimensions"
        )
    given: list[Any] = body.input if isinstance(body.input, list) else [body.input]
    several = given if isinstance(given[0], str | list) else [given]
    texts = [one if isinstance(one, str) else embedder.decode(one) for one in several]
    sizes = embedder.sizes(texts)
    for index, size in enumerate(sizes):
        if size > embedder.max_tokens:
            raise ContextTooLong(
                f"input[{index}] has {size} tokens, but {body.model} reads {embedder.max_tokens}", param="input"
            )
    return texts, sum(sizes)


def _wire(vector: "NDArray[np.float32]", encoding: str) -> list[float] | str:
    """base64 is of the little-endian float32 numbers, as OpenAI's SDKs ask for it."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
