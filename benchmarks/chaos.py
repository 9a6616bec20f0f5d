"""What goes wrong, all at once, against a real gateway process; and that nothing is left of it afterwards.

Run: python benchmarks/chaos.py [--requests 2000] [--leavers 1000] [--loris 200] [--engine]

1. `--requests` chats at 100 a time over an upstream that resets, ends in the middle, says 429, 500 and 503, answers
   nonsense, drips or is silent, while the policy file changes every half second. Each must end whole or with an error.
2. `--leavers` clients that leave at any moment, politely or with a reset, streamed or not.
3. `--loris` clients that send their head, and as many that send their body, a byte at a time.
4. All places of the upstream's pool are still there: as many requests at a time as it has connections.
5. SIGTERM with 50 streams open: they finish.
6. `--engine`: `--leavers` clients that leave an embedded model; its pages and places are free afterwards.

After 1 to 3 tasks, files and requests in flight must be back at what they were. Exits with 1 if anything is wrong.
"""

import argparse
import asyncio
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from chaos_client import Ask, outcome
from chaos_file import ChangingFile
from chaos_upstream import BEHAVIOURS, ChaosUpstream

POOL = 64
AT_A_TIME = 100
KINDS = [name for name in BEHAVIOURS if name not in ("long", "silent")]
ENGINE = (
    "  near: {kind: embedded, model: smollm2-135m-instruct, kv_memory: 256MiB, queue: 2000, queue_tokens: 1000000}\n"
)


@dataclass
class Running:
    """The gateway process and its file."""

    port: int
    process: "subprocess.Popen[bytes]"
    file: ChangingFile

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=30).raise_for_status()

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def held(self) -> dict[str, float]:
        """What the gateway holds when nobody asks anything else."""
        rss = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
        at_the_door = self.metric("promptsluice_key_active")
        inside = self.get("/_inside").json()
        return {**inside, "in_flight": self.metric("promptsluice_http_in_flight"), "at_the_door": at_the_door,
                "rss_mib": round(rss, 1)}  # fmt: skip


@contextmanager
def running(upstream: int, *, engine: bool) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="chaos-") as root, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        file = ChangingFile(path=Path(root, "policy.yaml"), upstream=upstream, pool=POOL, more=ENGINE if engine else "")
        file.write(read=3)
        gateway = Path(__file__).with_name("chaos_gateway.py")
        with Path(root, "log").open("wb") as log:  # which has a line for each failure
            process = subprocess.Popen(
                [sys.executable, str(gateway), str(file.path), str(port)], stdout=log, stderr=log
            )
        made = Running(port, process, file)
        try:
            until(lambda: ready(made), seconds=120)
            yield made
        finally:
            process.kill()
            process.wait()


def ready(gateway: Running) -> bool:
    try:
        return gateway.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def until(true: object, *, seconds: float) -> bool:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


async def load(port: int, asks: Sequence[Ask]) -> Counter[str]:
    places, found = asyncio.Semaphore(AT_A_TIME), Counter[str]()

    async def one(ask: Ask) -> None:
        async with places:
            found[await outcome(port, ask)] += 1

    await asyncio.gather(*map(one, asks))
    return found


async def rewriting(gateway: Running) -> None:
    """Another version every half second; each makes the backend anew and retires the old one."""
    for version in range(10_000):
        gateway.file.write(read=2 + version % 2)
        await asyncio.sleep(0.5)


async def loris(port: int, *, body: bool) -> str:
    """Drips until it is cut off."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n"
    try:
        writer.write(head if body else head[:20])
        cut = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(60):
            while not cut.done():
                writer.write(b"x")
                await asyncio.wait({cut}, timeout=0.5)
        return cut.result()[:12].decode() or "cut"
    except TimeoutError:
        return "wrong: still there"
    except OSError:
        return "cut"
    finally:
        writer.close()


class Judge:
    """Prints each part, and remembers what was wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def found(self, part: str, outcomes: Counter[str]) -> None:
        print(f"{part}: {dict(outcomes.most_common())}")
        self.wrong += [f"{part}: {what} ({count})" for what, count in outcomes.items() if what.startswith("wrong")]

    def must(self, true: bool, what: str) -> None:
        print(f"{'ok' if true else 'WRONG'}: {what}")
        if not true:
            self.wrong.append(what)

    async def left(self, gateway: Running, before: dict[str, float], part: str) -> None:
        """Whether the gateway holds what it held before. Connections that wait for the next request may stay."""

        def back() -> bool:
            now = gateway.held()
            same = all(now[name] <= before[name] for name in ("in_flight", "at_the_door"))
            return same and now["tasks"] <= before["tasks"] + 2 and now["files"] <= before["files"] + POOL

        ok = await asyncio.to_thread(until, back, seconds=45)
        self.must(ok, f"{part}: nothing is left: {await asyncio.to_thread(gateway.held)}, before {before}")


async def main(options: argparse.Namespace) -> int:
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    judge, upstream, dice = Judge(), ChaosUpstream(), random.Random(options.seed)
    port = await upstream.open()
    starting = running(port, engine=options.engine)
    gateway = await asyncio.to_thread(starting.__enter__)
    try:
        await parts(gateway, judge, dice, options)
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)
        upstream.close()
    print("\n".join(["nothing was wrong"] if not judge.wrong else ["", "WRONG:", *judge.wrong]))
    return 1 if judge.wrong else 0


async def parts(gateway: Running, judge: Judge, dice: random.Random, options: argparse.Namespace) -> None:
    await load(gateway.port, [Ask(how="well", stream=bool(i % 2)) for i in range(AT_A_TIME)])
    before = await asyncio.to_thread(gateway.held)
    changing = asyncio.ensure_future(rewriting(gateway))
    asks = [Ask(how=dice.choice([*KINDS, "well", "well"]), stream=dice.random() < 0.5) for _ in range(options.requests)]
    asks += [Ask(how="silent", stream=bool(i % 2)) for i in range(20)]
    dice.shuffle(asks)
    judge.found("storm", await load(gateway.port, asks))
    changing.cancel()
    await judge.left(gateway, before, "storm")

    asks = [
        Ask(how=dice.choice(["well", "long", "silent", "drip"]), stream=dice.random() < 0.7,
            leaves_s=dice.choice([0.0, dice.uniform(0, 0.02), dice.uniform(0, 0.4)]), rude=dice.random() < 0.5)
        for _ in range(options.leavers)
    ]  # fmt: skip
    judge.found("leavers", await load(gateway.port, asks))
    await judge.left(gateway, before, "leavers")

    slow = [loris(gateway.port, body=bool(i % 2)) for i in range(2 * options.loris)]
    judge.found("loris", Counter(await asyncio.gather(*slow)))
    await judge.left(gateway, before, "loris")

    began = time.monotonic()
    found = await load(gateway.port, [Ask(how="long", stream=True) for _ in range(POOL)])
    judge.found("all places of the pool", found)
    judge.must(found["whole"] == POOL and time.monotonic() - began < 15, "no place of the pool is lost")
    if options.engine:
        await engine_part(gateway, judge, dice, options.leavers)

    streams = [asyncio.ensure_future(outcome(gateway.port, Ask(how="long", stream=True))) for _ in range(50)]
    while await asyncio.to_thread(gateway.metric, "promptsluice_key_active") < len(streams):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    gateway.process.send_signal(signal.SIGTERM)
    found = Counter(await asyncio.gather(*streams))
    judge.found("SIGTERM with streams open", found)
    judge.must(found == Counter({"whole": 50}), "all streams finish")
    code = await asyncio.to_thread(gateway.process.wait, 40)
    judge.must(code in (0, -signal.SIGTERM), f"the process ended with {code}")


async def engine_part(gateway: Running, judge: Judge, dice: random.Random, leavers: int) -> None:
    """Clients that leave an embedded model before, while and after it writes."""
    await load(gateway.port, [Ask(how="", stream=True, model="smollm2-135m-instruct", text="Hello", max_tokens=4)])
    asks = [
        Ask(how="", stream=dice.random() < 0.7, model="smollm2-135m-instruct", max_tokens=60,
            text=" ".join(dice.choices(["apple", "harbour", "seven", "blue", "quiet"], k=dice.randrange(5, 200))),
            leaves_s=dice.choice([0.0, dice.uniform(0, 0.3), dice.uniform(0, 3)]), rude=dice.random() < 0.5)
        for _ in range(leavers)
    ]  # fmt: skip
    judge.found("leavers of the engine", await load(gateway.port, asks))

    def idle() -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return not any(gateway.metric(name) for name in names)

    judge.must(await asyncio.to_thread(until, idle, seconds=60), "the engine holds no page and no request")
    again = [Ask(how="", stream=True, model="smollm2-135m-instruct", text="Hello", max_tokens=4)]
    judge.found("the engine afterwards", await load(gateway.port, again))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--leavers", type=int, default=1000)
    parser.add_argument("--loris", type=int, default=200)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(asyncio.run(main(parser.parse_args())))
