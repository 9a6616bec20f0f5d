"""Does the planner pay? 500 mixed requests under `off`, under each method alone, and under the planner.

Run: python benchmarks/plan.py FOLDER [--requests 500] [--ways off planner ...] [--model NAME_OR_DIR] [--rows FILE]

Every way has a gateway of its own in this process, with its own engine, caches and learned costs, on the whole HTTP
path without a socket. All get the same requests in the same order, one at a time: request N is asked under every way,
in turns, before request N+1, so that a machine that slows down slows all of them. A method alone is always used where
it may be used at all; the planner has the same methods with the same options and chooses. A time is that of the whole
answer of `--tokens` tokens. What a gateway does when nobody waits (KV of new text is computed and stored) is waited
for, and told as idle work. Loading the models and the first use of each is not counted.

`--rows` names a file to which each request is appended as it ends; requests that are there already are not asked
again, so that a long run may be made in parts. Each part begins with empty caches.

Not here: what the answers are worth (compress_quality.py, blend_quality.py).
"""

import argparse
import asyncio
import functools
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plan_requests import SHARES, Asked, mixed
from rich.console import Console
from rich.table import Table
from ttft_rag import machine

if TYPE_CHECKING:
    from promptsluice.gateway.house import Sluice

OFF, PLANNER, CAREFUL = "off", "planner", "planner-blend"
_TEXT = "kinds: [document, history, tool_result]"
_METHODS = {
    "lossless": "{use: lossless}",
    "extractive": f"{{use: extractive, {_TEXT}, target_rate: 0.5, min_tokens: 64}}",
    "perplexity": f"{{use: perplexity, {_TEXT}, target_rate: 0.5, min_tokens: 64}}",
    "summarize": f"{{use: summarize, {_TEXT}, min_tokens: 64, options: {{backend: local, model: local, timeout: 60}}}}",
}
_KV = ("reuse", "blend")
_PLANNERS = {CAREFUL: "blend", PLANNER: "reuse"}
WAYS = (OFF, *_METHODS, *_KV, *_PLANNERS)
_ALWAYS = "token_value_ms: 1000000, rewrite_timeout: 600"
_TOLD = ("overhead_ms", "tokens_in", "tokens_out", "cached", "reused", "recomputed")
_PATIENCE_S = 600.0
_LOOK_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request under one way: seconds until the answer was there and until the gateway was idle again."""

    request: int
    kind: str
    way: str
    seconds: float
    idle_s: float
    overhead_ms: float
    tokens_in: int
    tokens_out: int
    cached: int
    reused: int
    recomputed: int
    steps: dict[str, float]  # milliseconds by name


def policy_of(way: str) -> str:
    """The policy of a way, in YAML."""
    quality = "quality: {sample: 0}"
    if way == OFF:
        return "{extends: off}"
    if way in _METHODS:
        return f"{{compress: [{_METHODS[way]}], {quality}, {_ALWAYS}}}"
    if way in _KV:
        return f"{{reuse: {{mode: {way}}}, {quality}}}"
    return f"{{compress: [{', '.join(_METHODS.values())}], reuse: {{mode: {_PLANNERS[way]}}}, {quality}}}"


def policy_file(way: str, *, root: Path, options: argparse.Namespace) -> str:
    """A gateway for one way."""
    return (
        f"version: 1\ndefault_policy: way\npolicies: {{way: {policy_of(way)}}}\n"
        f"server: {{log: {{format: json}}, ui: false}}\n"
        f"kv_cache: {{path: {root / way}, disk: 0, ram: 1GiB}}\ncollections: {{root: {root / way / 'collections'}}}\n"
        f"backends: {{local: {{kind: embedded, model: {options.model}, served_name: local, dtype: float32, "
        f"kv_memory: {options.kv_memory}, threads: {options.threads}}}}}\n"
    )


class Gateway:
    """One way's."""

    def __init__(self, way: str, client: Any, sluice: "Sluice") -> None:
        self.way = way
        self._client = client
        self._backend = sluice.backends["local"]

    async def ask(self, number: int, asked: Asked, *, tokens: int) -> Row:
        """Have a request answered, and wait until nothing is left to do. SystemExit where it fails."""
        body = {"model": "local", "messages": asked.messages, "max_tokens": tokens, "temperature": 0}
        began = time.perf_counter()
        reply = await self._client.post("/v1/chat/completions", json={**body, "ignore_eos": True})
        seconds = time.perf_counter() - began
        if reply.status_code != 200:
            raise SystemExit(f"request {number} under {self.way}: {reply.status_code} {reply.text[:500]}")
        await self._idle()
        report = reply.json()["promptsluice"]
        return Row(
            request=number,
            kind=asked.kind,
            way=self.way,
            seconds=seconds,
            idle_s=time.perf_counter() - began - seconds,
            **{name: report[name] for name in _TOLD},
            steps={step["name"]: step["ms"] for step in report["steps"]},
        )

    async def _idle(self) -> None:
        """Wait for the work that nobody waits for."""
        until = time.perf_counter() + _PATIENCE_S
        while any(self._backend.stats()[name] for name in ("kv_jobs", "waiting", "running")):
            if time.perf_counter() > until:
                raise SystemExit(f"the gateway of {self.way} was still at work after {_PATIENCE_S:.0f} s")
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def opened(way: str, root: Path, options: argparse.Namespace) -> AsyncIterator[Gateway]:
    """A gateway that is ready, with all that it loads at its first use loaded."""
    import httpx
    from promptsluice.gateway.app import create_app
    from promptsluice.policies import PolicySet

    app = create_app(PolicySet.from_text(policy_file(way, root=root, options=options)))
    async with app.router.lifespan_context(app):
        sluice = app.state.sluice
        await sluice.backends["local"].available()
        await asyncio.to_thread(sluice.rooms.embed, ["to load it"])
        transport = httpx.ASGITransport(app)
        headers = {"x-promptsluice-report": "1"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers, timeout=None
        ) as client:
            gateway = Gateway(way, client, sluice)
            for asked in _first():
                await gateway.ask(-1, asked, tokens=2)
            yield gateway


def _first() -> Iterable[Asked]:
    text = " ".join(f"Sentence number {number} of a text that warms up." for number in range(40))
    yield Asked("warm-up", [{"role": "user", "content": "Hello"}])
    documents = {"role": "user", "content": f"<document>\n{text}\n</document>"}
    yield Asked("warm-up", [documents, {"role": "user", "content": "Which number is the last?"}])


@contextmanager
def one_copy_of_the_weights() -> Iterator[None]:
    """A gigabyte for each engine otherwise. They may share it, for only one of them computes at a time."""
    from promptsluice.gateway.backends import engine_room

    load = engine_room.load_model
    engine_room.load_model = functools.cache(load)
    try:
        yield
    finally:
        engine_room.load_model = load


async def measured(requests: Sequence[Asked], rows: list[Row], options: argparse.Namespace) -> None:
    """Ask what `rows` does not have yet, and add it."""
    done = {row.request for row in rows}
    with tempfile.TemporaryDirectory() as root:
        async with AsyncExitStack() as stack:
            stack.enter_context(one_copy_of_the_weights())
            gateways = [await stack.enter_async_context(opened(way, Path(root), options)) for way in options.ways]
            gc.collect()
            gc.freeze()
            began = time.perf_counter()
            for number, asked in enumerate(requests):
                if number in done:
                    continue
                if options.seconds and time.perf_counter() - began > options.seconds:
                    break
                turn = number % len(gateways)
                fresh = [
                    await gateway.ask(number, asked, tokens=options.tokens)
                    for gateway in (*gateways[turn:], *gateways[:turn])
                ]
                rows += fresh
                _append(options.rows, fresh)


def _append(path: Path | None, rows: Iterable[Row]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(asdict(row))}\n" for row in rows)


def _read(path: Path | None, ways: Sequence[str]) -> list[Row]:
    """What an earlier part has measured. SystemExit where it was under other ways."""
    if path is None or not path.exists():
        return []
    rows = [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if rows and {row.way for row in rows} != set(ways):
        raise SystemExit(f"{path} has other ways than {', '.join(ways)}: name another file for --rows")
    return rows


def tables(rows: Sequence[Row], ways: Sequence[str]) -> list[Table]:
    """One for each class, and one for all."""
    kinds = [kind for kind in SHARES if any(row.kind == kind for row in rows)]
    return [_table(kind, [row for row in rows if kind in (row.kind, "all")], ways) for kind in (*kinds, "all")]


def _table(kind: str, rows: Sequence[Row], ways: Sequence[str]) -> Table:
    base = {row.request: row.seconds for row in rows if row.way == OFF}
    table = Table(title=f"{kind}: {len({row.request for row in rows})} requests")
    table.add_column("way")
    for name in (
        "total s",
        "to off",
        "median of ratios",
        "p50 ms",
        "p95 ms",
        "idle work s",
        "tokens in",
        "sent",
        "cached",
        "reused",
        "recomputed",
    ):
        table.add_column(name, justify="right")
    for way in ways:
        own = [row for row in rows if row.way == way]
        seconds = sorted(row.seconds for row in own)
        ratios = [row.seconds / base[row.request] for row in own if row.request in base]
        total = sum(seconds)
        counts = (sum(getattr(row, name) for row in own) for name in ("tokens_in", "tokens_out", "cached"))
        reused, again = sum(row.reused for row in own), sum(row.recomputed for row in own)
        table.add_row(
            way,
            f"{total:.1f}",
            f"{total / sum(base.values()):.3f}" if base else "",
            f"{statistics.median(ratios):.3f}" if ratios else "",
            f"{1000 * statistics.median(seconds):.0f}",
            f"{1000 * seconds[max(0, -(-len(seconds) * 95 // 100) - 1)]:.0f}",
            f"{sum(row.idle_s for row in own):.1f}",
            *map(str, counts),
            str(reused),
            str(again),
        )
    return table


def verdict(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """For each planner: whether it is at most 2 % worse than `off` in each class, and which way is best over all. The
    one that repairs stored KV is held against all ways but those that do not."""
    total = functools.partial(_total, rows)
    said: list[str] = []
    for planner in (way for way in _PLANNERS if {OFF, way} <= set(ways)):
        ratios = {kind: total(planner, kind) / total(OFF, kind) for kind in SHARES if total(OFF, kind)}
        rivals = [way for way in ways if planner == PLANNER or way not in (PLANNER, "reuse")]
        best, worst = min(rivals, key=total), max(ratios, key=lambda kind: ratios[kind])
        held = "at most" if ratios[worst] <= 1.02 else "MORE than"
        said.append(
            f"{planner} takes {total(planner) / total(OFF):.3f} of off over all and is {held} 2 % worse in each class "
            f"(worst: {worst}, {ratios[worst]:.3f}); best of {', '.join(rivals)}: {best} "
            f"({total(best) / total(OFF):.3f})"
        )
    return "\n".join(said) or f"no verdict without {OFF} and a planner"


def _total(rows: Sequence[Row], way: str, kind: str = "") -> float:
    """Seconds of a way, over one class or all."""
    return sum(row.seconds for row in rows if row.way == way and kind in ("", row.kind))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[way for way in WAYS if way != "summarize"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-memory", default="512MiB", help="of each engine")
    parser.add_argument("--rows", type=Path, help="append requests to this JSONL file, and go on where it ends")
    parser.add_argument("--seconds", type=float, help="begin no request after so long")
    options = parser.parse_args()
    # Must be set before torch is loaded: threads that spin while they wait steal time on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(options, Console(width=140))


def run(options: argparse.Namespace, console: Console) -> None:
    import torch

    torch.set_num_threads(options.threads)
    console.print(f"{machine()}; {options.model} in float32, answers of {options.tokens} tokens")
    rows = _read(options.rows, options.ways)
    asyncio.run(measured(mixed(options.folder, count=options.requests), rows, options))
    for table in tables(rows, options.ways):
        console.print(table)
    console.print(verdict(rows, options.ways))


if __name__ == "__main__":
    main()
