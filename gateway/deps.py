"""What routes depend on: the wired house and a caller whose key is known."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Request
from starlette.responses import Response
from starlette.types import Send

from .caller import Caller, caller_of
from .house import Sluice
from .keys.admission import identified


async def _sluice(request: Request) -> AsyncIterator[Sluice]:
    """The house as it is wired now, held until the response has been sent, whatever the file becomes meanwhile."""
    sluice: Sluice = request.app.state.sluice
    with sluice.held():
        yield sluice


House = Annotated[Sluice, Depends(_sluice)]


async def _known(request: Request, sluice: House) -> Caller:
    """Whom the edge has let in. Of routes that it leaves to themselves, whoever has an ordinary key."""
    caller: Caller | None = request.scope["state"].get("caller")
    if caller is None:
        stranger = caller_of(request.headers, request_id=request.state.request_id, path=request.url.path)
        return identified(sluice, stranger, scope="inference", what=request.url.path[:200])
    # Its body may have been long in coming: what counts is the file in force now.
    key = sluice.policy_set.keys.authenticated(caller.api_key)
    return caller if key is caller.key else replace(caller, key=key)


Known = Annotated[Caller, Depends(_known)]


async def called(endpoint: Callable[..., Awaitable[Response]], request: Request, send: Send) -> None:
    """Answer with an endpoint that asks for the request, the house and the caller; what FastAPI would do, at once."""
    sluice: Sluice = request.app.state.sluice
    with sluice.held():
        response = await endpoint(request, sluice, await _known(request, sluice))
        await response(request.scope, request.receive, send)
