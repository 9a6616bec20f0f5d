"""GET /v1/models and /v1/models/{id}: what the configured backends serve. Ids may hold slashes."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..policies.keyring import may_use_model
from ..prompt import UnknownModel
from .backends.base import ModelCard
from .caller import Caller
from .deps import House, Known
from .house import Sluice
from .wire import dumps

router = APIRouter()
_CREATED = int(time.time())


@router.get("/v1/models")
async def list_models(sluice: House, caller: Known) -> Response:
    """All models that the key may use, each once, in the order of the policy file."""
    cards = await _cards(sluice, caller)
    body = {"object": "list", "data": [_wire(card) for card in cards.values()]}
    return Response(dumps(body), media_type="application/json")


@router.get("/v1/models/{model:path}")
async def get_model(sluice: House, caller: Known, model: str) -> Response:
    """One model by its id."""
    card = (await _cards(sluice, caller)).get(model)
    if card is None:
        raise UnknownModel(f"the model {model[:80]!r} does not exist", param="model")
    return Response(dumps(_wire(card)), media_type="application/json")


async def _cards(sluice: Sluice, caller: Caller) -> dict[str, ModelCard]:
    listed = await asyncio.gather(*(backend.models() for backend in sluice.backends.values()))
    cards: dict[str, ModelCard] = {}
    for card in (card for cards_of_one in listed for card in cards_of_one):
        if may_use_model(caller.key, card.id):
            cards.setdefault(card.id, card)
    return cards


def _wire(card: ModelCard) -> dict[str, Any]:
    context = {} if card.context is None else {"max_model_len": card.context}
    return {"id": card.id, "object": "model", "created": _CREATED, "owned_by": card.owned_by, **context}
