"""Does the planner pay? 500 mixed requests under `off`, under each method alone, and under the planner.

Run: python benchmarks/plan.py FOLDER [--requests 500] [--ways off planner ...] [--model NAME_OR_DIR] [--rows FILE]
     python benchmarks/plan.py FOLDER --each N ...                 only the first N requests of each class
     python benchmarks/plan.py FOLDER --rows FILE --report ...     what the file has, and nothing is asked

Every way has a gateway of its own in this process, with its own engine, caches and learned costs, on the whole HTTP
path without a socket. All get the same requests in the same order, one at a time: request N is asked under every way,
in turns, before request N+1, so that a machine that slows down slows all of them. A method alone is always used where
it may be used at all; the planner has the same methods with the same options and chooses. A time is that of the whole
answer of `--tokens` tokens. What a gateway does when nobody waits (KV of new text is computed and stored) is waited
for, and told as idle work. Loading the models and the first use of each is not counted.

`--rows` names a file to which each request is appended as it ends; requests that are there already are not asked
again, so that a long run may be made in parts. Each part begins with empty caches; a run that rests while the file of
`--hold` exists keeps them. A run that is interrupted, or whose `--seconds` are over, rests aside, prints what it has.
`to off` is the ratio of sums, with the 95 % interval of a bootstrap over requests, each of which keeps its ways
together.

Not here: what the answers are worth (compress_quality.py, blend_quality.py).
"""

import argparse
import asyncio
import dataclasses
import functools
import gc
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_origin

import numpy as np
from kept_rows import append_rows, complete_rows, not_ours
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
_LOOK_HOLD_S = 1.0
_ROUNDS = 2000
_MARGIN = 1.02  # of `off`: more, in any class, is too much
_FEWEST = 5  # requests of a class that a verdict is made of


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
    setting: str = ""  # rows of others are not comparable


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
        f"backends: {{local: {{kind: embedded, model: {options.model}, served_name: local, dtype: {options.dtype}, "
        f"quantize: {options.quantize}, kv_memory: {options.kv_memory}, threads: {options.threads}}}}}\n"
    )


class Gateway:
    """One way's."""

    def __init__(self, way: str, client: Any, sluice: "Sluice", *, setting: str = "") -> None:
        self.way, self._setting = way, setting
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
            setting=self._setting,
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
            gateway = Gateway(way, client, sluice, setting=setting_of(options))
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


async def measured(
    requests: Sequence[Asked], rows: list[Row], options: argparse.Namespace, say: Callable[[str], object]
) -> None:
    """Ask what `rows` does not have yet, and add it."""
    done = {row.request for row in rows}
    left = [number for number in taken([asked.kind for asked in requests], options.each) if number not in done]
    with tempfile.TemporaryDirectory() as root:
        async with AsyncExitStack() as stack:
            stack.enter_context(one_copy_of_the_weights())
            gateways = [await stack.enter_async_context(opened(way, Path(root), options)) for way in options.ways]
            gc.collect()
            gc.freeze()
            worked = 0.0
            for number in left:
                if options.seconds and worked > options.seconds:
                    break
                await _rest(options.hold, say)
                began = time.perf_counter()
                turn = number % len(gateways)
                fresh = [
                    await gateway.ask(number, requests[number], tokens=options.tokens)
                    for gateway in (*gateways[turn:], *gateways[:turn])
                ]
                rows += fresh
                append_rows(options.rows, map(asdict, fresh))
                worked += time.perf_counter() - began


async def _rest(hold: Path | None, say: Callable[[str], object]) -> None:
    """While the file exists; says so once."""
    said = False
    while True:
        if not _held(hold):
            break
        if not said:
            say(f"rests while {hold} exists")
        said = True
        await asyncio.sleep(_LOOK_HOLD_S)


def _held(hold: Path | None) -> bool:
    return hold is not None and hold.exists()


def taken(kinds: Sequence[str], each: int | None) -> list[int]:
    """The requests that are asked, by their classes: the first `each` of every one, or all."""
    seen: Counter[str] = Counter()
    found: list[int] = []
    for number, kind in enumerate(kinds):
        seen[kind] += 1
        if each is None or seen[kind] <= each:
            found.append(number)
    return found


def setting_of(options: argparse.Namespace) -> str:
    """What all ways have in common."""
    held = options.dtype if options.quantize == "none" else f"{options.dtype} and {options.quantize}"
    return f"{options.model} in {held}, answers of {options.tokens} tokens, prompts of size {options.size:g}"


def _read(options: argparse.Namespace) -> list[Row]:
    """What an earlier part has measured of the requests. SystemExit where it was under other ways or settings, and
    where the file is damaged or of something else.
    """
    path, ways, setting = options.rows, set(options.ways), setting_of(options)
    # A request of which a part that was killed has some ways was asked again: the later rows count.
    found = (_row(value, path, number) for number, value in enumerate(complete_rows(path), 1))
    rows = list({(row.request, row.way): row for row in found}.values())
    if others := {row.setting for row in rows if row.setting != setting}:
        raise SystemExit(
            f"{path} has rows of {'; '.join(sorted(others))}, not of {setting}: name another file for --rows"
        )
    if not ways >= {row.way for row in rows}:
        raise SystemExit(f"{path} has other ways than {', '.join(options.ways)}: name another file for --rows")
    times = Counter(row.request for row in rows)
    kinds = {
        row.request: row.kind for row in rows if times[row.request] == len(ways) and row.request < options.requests
    }
    numbers = sorted(kinds)
    wanted = {numbers[at] for at in taken([kinds[number] for number in numbers], options.each)}
    return [row for row in rows if row.request in wanted]


def _row(value: Any, path: Path, number: int) -> Row:
    """A line of the file."""
    try:
        row = Row(**value)
    except TypeError:
        raise not_ours(path, number) from None
    for field in dataclasses.fields(Row):
        kind: Any = int | float if field.type is float else get_origin(field.type) or field.type
        if not isinstance(getattr(row, field.name), kind):
            raise not_ours(path, number)
    if row.seconds <= 0:
        raise not_ours(path, number)
    return row


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
        table.add_column(name, justify="right", no_wrap=True)
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
            str(ratio(rows, way)) if base else "",
            f"{statistics.median(ratios):.3f}" if ratios else "",
            f"{1000 * statistics.median(seconds):.0f}",
            f"{1000 * seconds[max(0, -(-len(seconds) * 95 // 100) - 1)]:.0f}",
            f"{sum(row.idle_s for row in own):.1f}",
            *map(str, counts),
            str(reused),
            str(again),
        )
    return table


class Ratio(NamedTuple):
    """The seconds of a way by those of `off`, and the borders of the 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}" if self.low == self.high else f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(rows: Sequence[Row], way: str, kind: str = "") -> Ratio:
    """Of sums over the requests of one class or all, by the bootstrap (Efron 1979) over requests."""
    off = {row.request: row.seconds for row in rows if row.way == OFF and kind in ("", row.kind)}
    own = {row.request: row.seconds for row in rows if row.way == way and row.request in off}
    pairs = np.array([(own[request], off[request]) for request in sorted(own)])
    drawn = np.random.default_rng(0).integers(0, len(pairs), (_ROUNDS, len(pairs)))
    sums = pairs[drawn].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    value, base = pairs.sum(axis=0)
    return Ratio(float(value / base), float(low), float(high))


def verdict(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """For each planner: whether it is at most 2 % worse than `off` in each class, and which way is best over all, or
    that there are too few requests of a class. The one that repairs stored KV is held against all ways but those that
    do not."""
    total = functools.partial(_total, rows)
    counts = Counter(row.kind for row in rows if row.way == OFF)
    few = [f"{kind} ({counts[kind]})" for kind in SHARES if 0 < counts[kind] < _FEWEST]
    said: list[str] = []
    for planner in (way for way in _PLANNERS if {OFF, way} <= set(ways)):
        whole = f"{planner} takes {ratio(rows, planner)} of off over all"
        if few:
            said.append(f"{whole}; too few requests for a verdict, {_FEWEST} of a class at least: {', '.join(few)}")
            continue
        ratios = {kind: ratio(rows, planner, kind) for kind in SHARES if total(OFF, kind)}
        rivals = [way for way in ways if planner == PLANNER or way not in (PLANNER, "reuse")]
        best, worst = min(rivals, key=total), max(ratios, key=lambda kind: ratios[kind])
        held = "at most" if ratios[worst].value <= _MARGIN else "MORE than"
        surely = all(one.high <= _MARGIN for one in ratios.values())
        said.append(
            f"{whole} and is {held} 2 % worse in each class "
            f"(worst: {worst}, {ratios[worst]}; {'all' if surely else 'NOT all'} intervals are below {_MARGIN}); "
            f"best of {', '.join(rivals)}: {best} ({total(best) / total(OFF):.3f})"
        )
    return "\n".join(said) or f"no verdict without {OFF} and a planner"


def _total(rows: Sequence[Row], way: str, kind: str = "") -> float:
    """Seconds of a way, over one class or all."""
    return sum(row.seconds for row in rows if row.way == way and kind in ("", row.kind))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--each", type=_at_least_one, help="only the first so many of each class")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[way for way in WAYS if way != "summarize"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-memory", default="512MiB", help="of each engine")
    parser.add_argument("--rows", type=Path, help="append requests to this JSONL file, and go on where it ends")
    parser.add_argument("--seconds", type=float, help="begin no request after so long, rests aside")
    parser.add_argument("--hold", type=Path, help="begin no request while this file exists; caches stay warm")
    parser.add_argument("--report", action="store_true", help="only print what --rows has")
    parser.add_argument("--size", type=float, default=1.0, help="of the prompts: 0.5 has half of the documents' text")
    parser.add_argument("--dtype", default="float32", help="of each engine; auto, bfloat16, ... as in a policy file")
    parser.add_argument("--quantize", default="none", help="int8, ... as in a policy file")
    options = parser.parse_args()
    # Must be set before torch is loaded: threads that spin while they wait steal time on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(options, Console(width=170))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return int(text)


def run(options: argparse.Namespace, console: Console) -> None:
    import torch

    torch.set_num_threads(options.threads)
    console.print(f"{machine()}; {setting_of(options)}")
    rows = _read(options)
    wanted, whereof = options.requests, ""
    if options.each is not None:
        whereof = f", the first {options.each} of each class"
    if not options.report:
        requests = mixed(options.folder, count=options.requests, size=options.size)
        if options.each is not None:
            wanted = len(taken([asked.kind for asked in requests], options.each))
            whereof += f" of {options.requests}"
        try:
            asyncio.run(measured(requests, rows, options, console.print))
        except KeyboardInterrupt:
            console.print("interrupted")
    done = len({row.request for row in rows})
    console.print(f"{done} of {wanted} requests under {len(options.ways)} ways{whereof}")
    if done:
        for table in tables(rows, options.ways):
            console.print(table)
        console.print(verdict(rows, options.ways))


if __name__ == "__main__":
    main()
