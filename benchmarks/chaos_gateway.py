"""The gateway of chaos.py, which also tells at /_inside what it holds: `chaos_gateway.py POLICY_FILE PORT`."""

import asyncio
import gc
import os
import sys

from promptsluice.gateway.app import create_app
from promptsluice.gateway.protocol import BoundedProtocol
from promptsluice.gateway.server import run
from promptsluice.policies import PolicySet

HEAD_S = 4.0  # else 30: nobody wants to wait for that here


def inside() -> dict[str, int]:
    """Tasks, open files (connections are some), and objects that Python's collector knows."""
    gc.collect()
    tasks = len(asyncio.all_tasks())
    return {"tasks": tasks, "files": len(os.listdir("/proc/self/fd")), "objects": len(gc.get_objects())}


async def tell() -> dict[str, int]:
    return inside()


def main(policy_file: str, port: str) -> None:
    policies = PolicySet.load(policy_file)
    app = create_app(policies, reload_every_s=0.2)
    app.add_api_route("/_inside", tell)
    BoundedProtocol.head_s = HEAD_S
    run(app, host="127.0.0.1", port=int(port), drain_s=policies.server.drain_timeout, log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:])
