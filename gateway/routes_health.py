"""/healthz (is the process alive), /readyz (can it answer) and /metrics (Prometheus text)."""

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from .deps import House
from .house import Sluice
from .wire import dumps

if TYPE_CHECKING:
    from ..backend_engine.readings import Readings

router = APIRouter()


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz(sluice: House) -> Response:
    """200 while the server lives; 503 when an engine hangs, which only a restart mends."""
    ok = sluice.healthy()
    return Response(dumps({"status": "ok" if ok else "hung"}), 200 if ok else 503, media_type="application/json")


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(request: Request, sluice: House) -> Response:
    """200 when every backend can answer; else 503 with the reason for each that cannot.

    `policy_file` says why a new version of it was refused, while the old one stays in force.
    """
    reasons = sluice.not_ready()
    refused = request.app.state.policy_file_refused
    body = {"status": "not ready" if reasons else "ready", "reasons": reasons}
    body |= {"policy_file": refused} if refused else {}
    return Response(dumps(body), 503 if reasons else 200, media_type="application/json")


@router.get("/metrics")
async def metrics(sluice: House) -> Response:
    """The gateway's metrics and the backends' gauges."""
    return Response(await asyncio.to_thread(_render, sluice), media_type=CONTENT_TYPE_LATEST)


def _render(sluice: Sluice) -> bytes:
    engines: dict[tuple[str, str], Readings] = {}
    for name, backend in sluice.backends.items():
        readings, spec = backend.readings(), sluice.policy_set.backends.get(name)
        if readings is not None and spec is not None:
            engines[next(iter(spec.models), ""), name] = readings
    sluice.metrics.backends.show({name: backend.stats() for name, backend in sluice.backends.items()})
    sluice.metrics.blends.show({name: backend.blends() for name, backend in sluice.backends.items()})
    sluice.metrics.costs.show(
        {name: (backend.costs(), backend.ledger.accuracy()) for name, backend in sluice.backends.items()}
    )
    sluice.metrics.engines.show(engines)
    return sluice.metrics.render()
