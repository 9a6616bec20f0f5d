"""The shortest way to the routes that all traffic takes: past FastAPI's router, dependencies and exit stacks.

FastAPI keeps the declaration and every other route. A route is taken out of its hands where its path is fixed, POST is
its only method, and all that it asks for is the request, the house and the caller.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from ..prompt import PromptsluiceError
from .deps import called
from .edge import App, Receive, Scope, Send

_ASKED = ["request", "sluice", "caller"]


class Direct:
    """Middleware that answers these routes itself; `on_error` makes the response for one of our errors."""

    def __init__(
        self, app: App, *, routers: Iterable[APIRouter], on_error: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._app = app
        self._on_error = on_error
        self._routes = {
            route.path: route
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute)
            and route.methods == {"POST"}
            and not route.param_convertors
            and list(inspect.signature(route.endpoint).parameters) == _ASKED
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            await called(route.endpoint, request, send)
        except PromptsluiceError as error:
            await (await self._on_error(request, error))(scope, receive, send)
