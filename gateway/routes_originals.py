"""GET /v1/originals/{id}: a text as it was before a policy with `originals` rewrote it."""

from fastapi import APIRouter
from starlette.responses import Response

from ..prompt import NotFound
from .deps import House, Known
from .wire import dumps

router = APIRouter()


@router.get("/v1/originals/{original_id}")
async def get_original(sluice: House, caller: Known, original_id: str) -> Response:
    """The text, for who sent it: ids are in the response field `promptsluice`, or in the text's own mark."""
    text = sluice.rooms.originals.get(caller.tenant, original_id)
    if text is None:
        raise NotFound(f"original {original_id[:80]!r} is not kept here (any more)", code="original_not_found")
    return Response(dumps({"id": original_id, "object": "original", "text": text}), media_type="application/json")
