"""The page at /ui, its files, and the JSON below /ui/api. Nothing in here changes anything."""

import asyncio
import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from ...prompt import NotFound
from ..records.series import joined
from ..wire import dumps
from .access import Looking, Viewer
from .system import system_view

router = APIRouter(include_in_schema=False)

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_SAFE = {
    # Nothing from elsewhere, nothing inline: what a prompt holds can be shown, but never run.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_FILES = {file.name: file.read_bytes() for file in Path(__file__).with_name("static").iterdir()}
_PAGE = "index.html"


@router.api_route("/ui", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """The page itself. It holds no data, so that it needs no key."""
    return _file(request, _PAGE)


@router.get("/ui/")
async def slash() -> Response:
    """To the page, also behind a proxy that serves us below a path of its own."""
    return RedirectResponse("../ui", status_code=308, headers=_SAFE)


@router.get("/ui/api/overview")
async def overview(
    viewer: Looking, window: Annotated[Literal["900", "3600", "86400", "0"], Query()] = "3600"
) -> Response:
    """Sums over the last `window` seconds, 0 for all since the start; and what all requests share."""
    return _json(await asyncio.to_thread(_overview, viewer, int(window)))


@router.get("/ui/api/requests")
async def requests(
    viewer: Looking, limit: Annotated[int, Query(ge=1, le=200)] = 50, before: Annotated[str, Query()] = ""
) -> Response:
    """The last requests, the latest first; those before the record `before`."""
    records = viewer.sluice.rooms.records
    found = await asyncio.to_thread(records.page, viewer.tenant, limit=limit, before=before or None)
    return _json({"requests": found, "kept": records.held(viewer.tenant)[0]})


@router.get("/ui/api/requests/{record_id}")
async def one_request(viewer: Looking, record_id: str) -> Response:
    """All that is kept of one request."""
    record = viewer.sluice.rooms.records.get(viewer.tenant, record_id)
    return Response(await asyncio.to_thread(lambda: dumps(record.detail())), headers=_private())


@router.api_route("/ui/{name}", methods=["GET", "HEAD"])
async def static_file(request: Request, name: str) -> Response:
    """A file of the page."""
    return _file(request, name)


def _overview(viewer: Viewer, window_s: int) -> dict[str, Any]:
    sluice = viewer.sluice
    records = sluice.rooms.records
    policies, slot_s, slots = records.sums(viewer.tenant, window_s=window_s)
    return {
        "viewer": {"key": viewer.key_name, "everybody": viewer.tenant is None},
        "not_ready": sluice.not_ready(),
        "started": records.started,
        "window_s": window_s,
        "slot_s": slot_s,
        "slots": [
            {
                "at": at,
                "ok": one["ok"],
                "errors": one["failed"] + one["refused"],
                "cancelled": one["cancelled"],
                "ttft_ms": {name: _ms(one.quantile(share)) for name, share in (("p50", 0.5), ("p95", 0.95))},
            }
            for at, one in slots
        ],
        "totals": joined(policies.values()).to_wire(),
        "policies": [{"policy": name, **one.to_wire()} for name, one in sorted(policies.items())],
        "system": system_view(sluice) if viewer.system else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _json(body: dict[str, Any]) -> Response:
    return Response(dumps(body), headers=_private())


def _private() -> dict[str, str]:
    return {**_SAFE, "content-type": "application/json", "cache-control": "no-store"}


def _file(request: Request, name: str) -> Response:
    content = _FILES.get(name)
    if content is None:
        raise NotFound(f"there is no file {name[:80]!r} of the page", code="route_not_found")
    headers = {**_SAFE, "cache-control": "no-cache", "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers={**headers, "content-type": _TYPES[name.rpartition(".")[2]]})
