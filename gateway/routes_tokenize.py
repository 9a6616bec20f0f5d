"""POST /tokenize and /detokenize: text or chat to token ids and back; bodies as at vLLM's routes."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from ..prompt import Prompt
from .backends.base import Backend
from .bodies import Body, read_body
from .caller import Caller
from .deps import House, Known
from .house import Sluice
from .wire import dumps

router = APIRouter()


class TextOrChat(Body):
    """Either `prompt`, a text, or `messages` with their `tools`."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> "TextOrChat":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        return self


class Tokens(Body):
    """Ids of the model's vocabulary."""

    model: str
    tokens: list[Annotated[int, Field(ge=0)]] = Field(max_length=1 << 20)


@router.post("/tokenize")
async def tokenize(request: Request, sluice: House, caller: Known) -> Response:
    """The ids of a text, or of a chat as the model's template puts it. No policy is applied."""
    raw = await request.body()
    body = await sluice.readers.run(lambda: read_body(raw, TextOrChat))
    backend = await _backend(sluice, body.model, caller)
    ids = await sluice.readers.run(lambda: backend.tokenize(_prompt(body)))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": await _limit(backend, body.model), "tokens": [*ids]}
    if body.return_token_strs:
        answer["token_strs"] = await sluice.readers.run(lambda: [backend.detokenize([token]) for token in ids])
    return Response(await sluice.readers.run(lambda: dumps(answer)), media_type="application/json")


@router.post("/detokenize")
async def detokenize(request: Request, sluice: House, caller: Known) -> Response:
    """The text of ids, special tokens included."""
    raw = await request.body()
    body = await sluice.readers.run(lambda: read_body(raw, Tokens))
    backend = await _backend(sluice, body.model, caller)
    text = await sluice.readers.run(lambda: backend.detokenize(body.tokens))
    return Response(await sluice.readers.run(lambda: dumps({"prompt": text})), media_type="application/json")


def _prompt(body: TextOrChat) -> Prompt | str:
    if body.messages is None:
        return body.prompt or ""
    return Prompt.from_messages(body.messages, **({"tools": body.tools} if body.tools else {}))


async def _backend(sluice: Sluice, model: str, caller: Caller) -> Backend:
    found = sluice.policy_set.resolve(model, headers=caller.headers, api_key=caller.api_key)
    backend = sluice.backends[found.backend]
    await backend.available()
    return backend


async def _limit(backend: Backend, model: str) -> int | None:
    return next((card.context for card in await backend.models() if card.id == model), None)
