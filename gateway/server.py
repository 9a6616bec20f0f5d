"""Running the application under uvicorn: accept, serve, and at SIGTERM let running streams finish within the drain
time.
"""

import gc
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..policies import PolicySet
from .app import create_app
from .logs import log_config
from .protocol import BoundedProtocol


class _Server(uvicorn.Server):
    """uvicorn's server that tells /readyz as soon as it is asked to stop."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._promptsluice = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        sluice = getattr(self._promptsluice.state, "sluice", None)
        if sluice is not None:
            sluice.draining = True
        super().handle_exit(sig, frame)


def serve(policy_set: PolicySet, *, host: str | None = None, port: int | None = None, log_level: str = "info") -> None:
    """Serve until SIGINT or SIGTERM. `host` and `port` default to the policy file's.

    Raises ConfigError before anything is bound when an environment variable that the file names is not set.
    """
    policy_set.require_environment()
    settings = policy_set.server
    run(
        create_app(policy_set),
        host=settings.host if host is None else host,
        port=settings.port if port is None else port,
        drain_s=settings.drain_timeout,
        log_level=log_level,
    )


def run(app: FastAPI, *, host: str, port: int, drain_s: float, log_level: str = "info") -> None:
    """Run an application made by `create_app`."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,  # there is one line a request already, of the edge's
        log_config=log_config(getattr(app.state, "log_format", "text"), log_level),
        server_header=False,
        proxy_headers=False,  # nobody asks for the client's address
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        lifespan="on",
        http=BoundedProtocol,
        ws="none",
    )
    # What has been imported and made until now stays: full collections need not look at it again and again.
    gc.freeze()
    _Server(config, app).run()
