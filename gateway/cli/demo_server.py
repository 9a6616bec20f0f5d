"""A gateway as a real server process on a free loopback port, for the length of a `with` block. Demo only."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...prompt import PromptsluiceError

_STOP_S = 15.0
_POLL_S = 0.1


@contextmanager
def running_gateway(config: Path, *, log: Path, ready_s: float = 300.0) -> Iterator[str]:
    """Start `promptsluice serve` and give its base URL once it is ready; stop it when the body ends, however it ends.

    Raises PromptsluiceError with the end of its log when it dies or does not become ready in time.
    """
    port = free_port()
    command = [sys.executable, "-m", "promptsluice", "serve", "--config", str(config), "--offline"]
    with log.open("wb") as sink:
        # A session of its own: Ctrl-C reaches this process only, which then stops the server in an orderly way.
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
        )  # fmt: skip
    try:
        base_url = f"http://127.0.0.1:{port}"
        _wait_until_ready(server, base_url, log=log, ready_s=ready_s)
        yield base_url
    finally:
        stop(server)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """In the body, SIGTERM and SIGHUP end the program as Ctrl-C does: with its clean-up. Main thread only."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(server: "subprocess.Popen[bytes]", *, wait_s: float = _STOP_S) -> None:
    """Ask the process to end; kill it if it does not within `wait_s`."""
    server.terminate()
    try:
        server.wait(wait_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait_until_ready(server: "subprocess.Popen[bytes]", base_url: str, *, log: Path, ready_s: float) -> None:
    import httpx

    deadline = time.monotonic() + ready_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise PromptsluiceError(f"the gateway ended with code {server.returncode}:\n{_tail(log)}")
        try:
            if httpx.get(f"{base_url}/readyz", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(_POLL_S)
    raise PromptsluiceError(f"the gateway was not ready after {ready_s:.0f} s:\n{_tail(log)}")


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
