"""GET /openapi.json: the routes as an OpenAPI document, for generators of clients and of tests."""

from fastapi import APIRouter, Request
from starlette.responses import Response

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """What the routes take and give. Needs no key: it says nothing that this repository does not say."""
    return Response(request.app.state.openapi, media_type="application/json")
