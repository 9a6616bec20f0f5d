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
import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from kept_rows import append_rows
from plan_gateways import one_copy_of_the_weights, opened
from plan_report import tables, verdict
from plan_requests import Asked, mixed, taken
from plan_rows import Row, earlier_rows, setting_of
from plan_ways import WAYS
from rich.console import Console
from ttft_rag import machine

_LOOK_HOLD_S = 1.0


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
    rows = earlier_rows(options)
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
