"""The floor of gateway_overhead.py: a process that hands bytes on, unread, on connections that are kept.

Run: python benchmarks/overhead_relay.py PORT UPSTREAM_PORT

What it adds is what any process in between adds on this machine: two more hops over loopback and two more processes to
wake. What a gateway adds beyond it is its own.
"""

import argparse
import asyncio
from typing import cast

import uvloop


class Relay(asyncio.Protocol):
    """One end of a pair; what comes in here goes out there."""

    def __init__(self, upstream: int | None = None) -> None:
        self._upstream = upstream
        self._early: list[bytes] = []
        self.transport: asyncio.Transport | None = None
        self.other: Relay | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the class.
        self.transport = cast("asyncio.Transport", transport)
        if self._upstream is not None:
            self._opening = asyncio.create_task(self._open(self._upstream))

    async def _open(self, port: int) -> None:
        _, self.other = await asyncio.get_running_loop().create_connection(Relay, "127.0.0.1", port)
        self.other.other = self
        for data in self._early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def served(port: int, upstream: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Relay(upstream), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("upstream", type=int)
    args = parser.parse_args()
    uvloop.run(served(args.port, args.upstream))
