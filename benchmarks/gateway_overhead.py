"""What the gateway adds to a request, beside LiteLLM's proxy: milliseconds, requests/s, and memory over 10,000 streams.

Run: python benchmarks/gateway_overhead.py [--litellm /path/to/bin/litellm] [--connections 1,32,256] [--rounds 3]
         [--seconds 4] [--rates 5,50] [--gap-ms 0] [--streams 10000] [--policy off]

An upstream process answers each chat after 20 ms, whole or as 50 frames (overhead_upstream.py). The same client
(overhead_client.py) asks it directly, through `promptsluice serve` and through the proxy, each a process with one
worker, by turns (who is not asked is stopped), over loopback only. `relay` (overhead_relay.py) hands bytes on unread:
the floor for anything in between. The loads, for each number of connections, whole and streamed:
- paced: so many requests/s (`--rates`) at random times over all connections. What a side adds is its percentile less
  that of the direct run: for the first byte of the answer, and for its end. A side that cannot carry a rate falls
  behind, and its figures say so: a request is measured from when it was due.
  At few requests a second every process sleeps before each of them, and wakes with cold caches: a request then costs
  two or three times the CPU time that it costs in the closed loop. `--gap-ms` lets the frames come one by one; without
  it they come in a burst, so that all of a gateway's work on them stands in the time to the end.
- closed: each connection asks again at once. This gives requests/s; the two cores are full then, with client and
  upstream on them, too.

`--litellm` names the program in an environment of its own (pip install 'litellm[proxy]'). Exits with 1 where the
gateway adds 2 ms or more at the median at 32 connections, or more than a fifth of what the proxy adds, at any rate.
"""

import argparse
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import uvloop
from overhead_client import Timed, load, request_to
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
KEY = "sk-benchmark"
MOST_MS, MOST_SHARE = 2.0, 1 / 5
_PROXY = """model_list:
  - model_name: fake
    litellm_params: {{model: openai/fake, api_base: "http://127.0.0.1:{port}/v1", api_key: sk-none}}
general_settings: {{master_key: {key}}}
"""
_GATEWAY = """version: 1
default_policy: "{policy}"
backends:
  fake: {{kind: openai, base_url: "http://127.0.0.1:{port}/v1", models: [fake]}}
"""


@dataclass(frozen=True)
class Side:
    """Who is asked."""

    name: str
    port: int
    process: "subprocess.Popen[bytes]"

    @property
    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """All rounds of one side, by load: a rate in requests/s, or None for the closed loop."""

    runs: dict[float | None, list[Timed]] = field(default_factory=dict)
    cpu_ms: dict[float | None, list[float]] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def running(name: str, command: Sequence[str], port: int, *, probe: str | None, folder: Path) -> Iterator[Side]:
    """A server process in a session of its own, until it answers; ended with it."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"},
        )
    try:
        deadline = time.monotonic() + 120
        while not answers(port, probe):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not come up:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield Side(name, port, process)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(port: int, probe: str | None) -> bool:
    try:
        if probe is None:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        with urlopen(f"http://127.0.0.1:{port}{probe}", timeout=2) as response:
            return response.status == 200
    except (OSError, URLError):
        return False


@contextmanager
def sides(litellm: str | None, policy: str, gap_ms: float = 0.0) -> Iterator[list[Side]]:
    """Direct first, then the relay, the gateway, and the proxy where there is one."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port() for _ in range(4)]
        command = [sys.executable, str(HERE / "overhead_upstream.py"), str(ports[0]), "--gap-ms", str(gap_ms)]
        found = [stack.enter_context(running("direct", command, ports[0], probe=None, folder=folder))]
        command = [sys.executable, str(HERE / "overhead_relay.py"), str(ports[3]), str(ports[0])]
        found.append(stack.enter_context(running("relay", command, ports[3], probe=None, folder=folder)))
        file = folder / "policy.yaml"
        file.write_text(_GATEWAY.format(port=ports[0], policy=policy))
        command = [sys.executable, "-m", "promptsluice", "serve", "--config", str(file), "--port", str(ports[1])]
        found.append(stack.enter_context(running("promptsluice", command, ports[1], probe="/readyz", folder=folder)))
        if litellm is not None:
            file = folder / "litellm.yaml"
            file.write_text(_PROXY.format(port=ports[0], key=KEY))
            command = [litellm, "--config", str(file), "--host", "127.0.0.1", "--port", str(ports[2])]
            command += ["--num_workers", "1"]
            probe = "/health/liveliness"
            found.append(stack.enter_context(running("litellm", command, ports[2], probe=probe, folder=folder)))
        yield found


def measured(found: Sequence[Side], args: argparse.Namespace, *, connections: int, stream: bool) -> dict[str, Seen]:
    """Every side under all loads, by turns."""
    seen = {side.name: Seen() for side in found}
    # One connection cannot have two requests on their way, so that it can carry no more than this.
    loads = [*sorted({min(rate, 10.0 * connections) for rate in args.rates}), None]
    for _, side in product(range(args.rounds), found):
        request = request_to(side.port, model="fake", stream=stream, key=KEY)
        with alone(side, found):
            run(side, request, connections=connections, seconds=1.0)  # warm, with all connections open
            for rate in loads:
                before = side.cpu_s
                timed = run(side, request, connections=connections, seconds=args.seconds, rate=rate)
                seen[side.name].runs.setdefault(rate, []).append(timed)
                seen[side.name].cpu_ms.setdefault(rate, []).append(1000 * (side.cpu_s - before) / len(timed.end))
    return seen


@contextmanager
def alone(side: Side, found: Sequence[Side]) -> Iterator[None]:
    """Only the upstream and who is asked run: what another still does in the background is not its fault."""
    others = [one for one in found[1:] if one is not side]
    for one in others:
        os.killpg(one.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in others:
            os.killpg(one.process.pid, signal.SIGCONT)


def run(side: Side, request: bytes, *, connections: int, seconds: float, rate: float | None = None) -> Timed:
    return uvloop.run(load(side.port, request, connections=connections, seconds=seconds, rate=rate))


def percentile(runs: Sequence[Timed], share: float, what: str) -> float:
    """In milliseconds, the median over the runs."""
    values = []
    for one in runs:
        ordered = sorted(getattr(one, what))
        values.append(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))])
    return statistics.median(values)


def added(seen: dict[str, Seen], name: str, pace: float | None, share: float, what: str = "end") -> float:
    runs, base = seen[name].runs[pace], seen["direct"].runs[pace]
    return percentile(runs, share, what) - percentile(base, share, what)


def rows(seen: dict[str, Seen], connections: int, stream: bool) -> Iterator[list[str]]:
    for pace, name in product(seen["direct"].runs, seen):
        runs, figures = seen[name].runs[pace], [(0.5, "first"), (0.5, "end"), (0.95, "end"), (0.99, "end")]
        if name == "direct":
            cells = [f"[{percentile(runs, share, what):.1f}]" for share, what in figures]
        else:
            cells = [f"{added(seen, name, pace, share, what):.2f}" for share, what in figures]
        rate, cpu = statistics.median(run.rate for run in runs), statistics.median(seen[name].cpu_ms[pace])
        paced = "closed" if pace is None else f"{pace:.0f}/s"
        answer = "streamed" if stream else "whole"
        yield [str(connections), answer, paced, name, *cells, f"{rate:.0f}", f"{cpu:.2f}"]


def judged(seen: dict[str, Seen], stream: bool) -> Iterator[tuple[str, bool]]:
    """What must hold at 32 connections."""
    for pace in seen["direct"].runs:
        if pace is None:
            continue
        ours, way = added(seen, "promptsluice", pace, 0.5), f"{'streamed' if stream else 'whole'}, {pace:.0f}/s"
        yield f"{way}: adds {ours:.2f} ms at the median, must be under {MOST_MS:.0f} ms", ours < MOST_MS
        if "litellm" in seen:
            theirs = added(seen, "litellm", pace, 0.5)
            share = ours / theirs if theirs > 0 else float("inf")
            yield f"{way}: {share:.3f} of LiteLLM's {theirs:.2f} ms, must be at most {MOST_SHARE}", share <= MOST_SHARE


async def streamed(side: Side, count: int) -> None:
    """`count` streams over 32 connections, in about equal shares."""
    request, left = request_to(side.port, model="fake", stream=True, key=KEY), count
    while left > 0:
        timed = await load(side.port, request, connections=32, seconds=min(5.0, left / 100))
        left -= len(timed.end)


def memory(side: Side, count: int, console: Console) -> None:
    """The resident memory over many streams, once the first thousand have warmed all there is to warm."""
    uvloop.run(streamed(side, 1000))
    readings = [side.memory_mib]
    for _ in range(4):
        uvloop.run(streamed(side, count // 4))
        readings.append(side.memory_mib)
    told = ", ".join(f"{reading:.1f}" for reading in readings)
    console.print(f"{side.name}: resident MiB before {count} streams and after each quarter: {told}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", help="the proxy's program; without it only the gateway is measured")
    parser.add_argument("--connections", default="1,32,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rates", default="5,50", help="requests/s of the paced loads")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="between the frames of a stream")
    parser.add_argument("--streams", type=int, default=10_000, help="for the memory; 0 leaves it out")
    parser.add_argument("--policy", default="off")
    args = parser.parse_args()
    args.rates = [float(rate) for rate in args.rates.split(",")]
    console, verdicts = Console(width=140), list[tuple[str, bool]]()
    table = Table(title=f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; milliseconds")
    for name in ("conns", "answer", "load", "side", "first p50", "p50", "p95", "p99", "requests/s", "CPU/request"):
        table.add_column(name, justify="right")
    with sides(args.litellm, args.policy, args.gap_ms) as found:
        for connections in map(int, args.connections.split(",")):
            for stream in (False, True):
                seen = measured(found, args, connections=connections, stream=stream)
                for row in rows(seen, connections, stream):
                    table.add_row(*row)
                if connections == 32:
                    verdicts += judged(seen, stream)
        console.print(table)
        console.print("Added to the direct run's figure, which is in brackets; medians over the rounds.")
        if args.streams:
            memory(next(side for side in found if side.name == "promptsluice"), args.streams, console)
    for said, good in verdicts:
        console.print(("ok   " if good else "MISS ") + said)
    return 0 if all(good for _, good in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
