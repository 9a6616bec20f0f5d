"""The HTTP application: routes inside, the edge around them, one error form for everything."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..policies import PolicySet
from ..prompt import PromptsluiceError
from . import (
    routes_chat,
    routes_collections,
    routes_completions,
    routes_compress,
    routes_embeddings,
    routes_health,
    routes_messages,
    routes_models,
    routes_openapi,
    routes_originals,
    routes_responses,
    routes_tokenize,
)
from .backends.base import Backend
from .caller import caller_of
from .direct import Direct
from .edge import App, Edge, Receive, Scope, Send, decoded, error_headers, internal_error, log
from .errors import on_the_wire
from .house import Sluice
from .keys.admission import admitted
from .keys.ticket import Ticket
from .metrics import Metrics
from .observed import entered
from .openapi.document import document
from .reload import watching
from .tracing import traced
from .ui import routes as routes_ui
from .wire import dumps

# A slow line may need a minute for a large prompt; a client that drips bytes must not hold a place for ever.
_BODY_S = 120.0
_ROUTES = (
    routes_chat,
    routes_completions,
    routes_responses,
    routes_messages,
    routes_compress,
    routes_embeddings,
    routes_tokenize,
    routes_models,
    routes_collections,
    routes_health,
    routes_openapi,
    routes_originals,
)


class Application(FastAPI):
    """FastAPI with `around` its own layers of middleware, so that what is answered there never gets into them.

    Middleware that is added to the application is asked before all of that.
    """

    def __init__(self, around: Callable[[App], App], **options: Any) -> None:
        super().__init__(**options)
        self._around = around

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What FastAPI's and Starlette's do, but for FastAPI's own telemetry: the edge has ours."""
        if scope["type"] != "http" or self.middleware_stack is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        if self.root_path:
            scope["root_path"] = self.root_path
        await self.middleware_stack(scope, receive, send)

    def build_middleware_stack(self) -> App:
        added, self.user_middleware = self.user_middleware, []
        try:
            app = self._around(super().build_middleware_stack())
        finally:
            self.user_middleware = added
        for cls, args, kwargs in reversed(added):
            app = cls(app, *args, **kwargs)
        return app


def create_app(
    policy_set: PolicySet, *, backends: Mapping[str, Backend] | None = None, reload_every_s: float = 1.0
) -> FastAPI:
    """The application for a policy file. Its rooms open at start-up, in the lifespan, and close at shutdown.

    `backends` take the place of those of the same name in the policy file, which is looked at every `reload_every_s`
    seconds for a new version.
    """

    metrics = Metrics(models=policy_set.model_names())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with traced() as app.state.traces:
            sluice = await Sluice.open(policy_set, backends=backends, metrics=metrics)
            app.state.sluice = sluice
            try:
                async with watching(app, given=backends or {}, every_s=reload_every_s):
                    yield
            finally:
                await app.state.sluice.close()

    limits = policy_set.server

    def around(framework: App) -> App:
        return Edge(
            Direct(framework, routers=[routes.router for routes in _ROUTES], on_error=_own_error),
            max_body_bytes=limits.max_body_bytes,
            body_timeout_s=min(limits.request_timeout, _BODY_S),
            metrics=metrics,
            admit=_admit,
            traces=lambda: app.state.traces,
        )

    # No schema of FastAPI's making: bodies are read by our own rooms, so it would describe none of them.
    app = Application(around, title="promptsluice", lifespan=lifespan, redirect_slashes=False, openapi_url=None)
    for routes in _ROUTES:
        app.include_router(routes.router)
    if policy_set.server.ui:
        app.include_router(routes_ui.router)
    app.state.openapi = dumps(document(app.routes))
    app.add_exception_handler(PromptsluiceError, _own_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _bug)
    app.state.traces = None
    app.state.log_format = limits.log.format
    return app


async def _admit(scope: Scope) -> Ticket | None:
    """The edge's question whom to let in; routes find the answer as the request's caller."""
    sluice: Sluice = scope["app"].state.sluice
    state = scope["state"]
    stranger = caller_of(decoded(scope), request_id=state["request_id"], path=scope["path"])
    caller = await admitted(sluice, stranger, method=scope["method"], path=scope["path"])
    if caller is not stranger:
        state["caller"] = caller
    if caller.key is not None:
        entered(key=caller.key.name)
    return caller.ticket


async def _own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PromptsluiceError), error
    if error.status >= 500:
        log.warning("request %s: %s", request.state.request_id, error.message)
    return _answered(request, error.status, error.to_wire(), error_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such route, wrong method."""
    assert isinstance(error, HTTPException), error
    code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code)
    path = f"{request.method} {request.url.path[:200]}"
    message = f"there is no {path}" if error.status_code == 404 else f"{path}: {error.detail}"
    headers = {"allow": _methods_of(request.url.path)} if error.status_code == 405 else error.headers
    return _wire_error(request, error.status_code, message, code=code, headers=headers)


def _methods_of(path: str) -> str:
    """All methods of a path; Starlette tells those of the first route only."""
    known = (route for routes in _ROUTES for route in routes.router.routes if isinstance(route, APIRoute))
    methods = {method for route in known if route.path_regex.match(path) for method in route.methods or ()}
    return ", ".join(sorted(methods))


async def _validation_error(request: Request, error: Exception) -> Response:
    """FastAPI's complaints about path and query parameters; bodies are read by our own rooms."""
    assert isinstance(error, RequestValidationError), error
    first = error.errors()[0]
    param = ".".join(str(step) for step in first["loc"][1:]) or None
    return _wire_error(request, 400, f"{param}: {first['msg']}", param=param)


async def _bug(request: Request, error: Exception) -> Response:
    """Instead of Starlette's plain text. It is raised on to the edge, which logs it."""
    return _answered(request, 500, internal_error(request.state.request_id).to_wire(), {})


def _wire_error(
    request: Request,
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return _answered(request, status, body, headers or {})


def _answered(request: Request, status: int, error: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    entered(error=error["error"]["code"] or error["error"]["type"])
    status, body, more = on_the_wire(request.url.path, status, error, request_id=request.state.request_id)
    return Response(body, status, {**headers, **more}, media_type="application/json")
