"""Whether deciding pays: mixed prompts served by the controller, by full prefill, and always blended, TTFT of each.

Run: python benchmarks/blend_control.py [FOLDER] [--prompts 200] [--model NAME_OR_DIR] [--threads N]
     python benchmarks/blend_control.py --prompts 36 --longest 900   (two cores, two minutes)

Prompts are drawn from one seed: short ones without documents, ones with one to six chunks of 40 to 400 tokens of the
folder's texts, of which some are not stored, and repeats of an earlier prompt (a hit in the prefix tree, or of a kept
blend).
Each prompt takes the ways in a fresh order; each way has a prefix tree's namespace of its own. TTFT counts deciding,
lookup and moving. The last lines compare sums and what was predicted with what came true. Must: the controller's sum is
at most 1.03 times full prefill's. Not here: the answers' quality (blend_quality.py).
"""

import argparse
import os
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table
from ttft_rag import DEFAULT_FOLDER, QUESTION, SYSTEM, machine, read_chunks

if TYPE_CHECKING:
    from promptsluice.backend_engine import ChatTokenizer
    from promptsluice.backend_engine.service import EngineService
    from promptsluice.backend_engine.types import Reuse
    from promptsluice.kv_reuse import Reuser
    from promptsluice.kv_reuse.controller import Choice, Controller
    from promptsluice.kv_reuse.repeats import Beginnings

FULL, CONTROLLED, ALWAYS = "full prefill", "controller", "always blended"
SELECTOR, RATIO = "auto", 0.15
SIZES = (40, 80, 160, 300, 400)
UNSTORED, REPEATED, SHORT = 0.25, 0.15, 0.3  # shares of the prompts


@dataclass(frozen=True)
class Asked:
    """A prompt: `spans` (start, tokens) are its chunks, stored or not."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    kind: str


@dataclass
class Seen:
    """Milliseconds of each prompt, by way, and how the controller's predictions compare."""

    ttft: dict[str, list[float]] = field(default_factory=lambda: {FULL: [], CONTROLLED: [], ALWAYS: []})
    ways: Counter[str] = field(default_factory=Counter)
    errors: list[float] = field(default_factory=list)


class Drawn:
    """Prompts of all kinds, the same for each run."""

    def __init__(self, tokenizer: "ChatTokenizer", chunks: list[list[int]], *, longest: int) -> None:
        self._tokenizer, self._chunks, self._longest = tokenizer, chunks, longest
        self._random = random.Random(0)
        self.stored = [chunk[:size] for chunk in chunks[::2] for size in (self._random.choice(SIZES),)]
        self._fresh = chunks[1::2]
        self._before: list[Asked] = []

    def next(self) -> Asked:
        draw = self._random.random()
        if self._before and draw < REPEATED:
            asked = self._random.choice(self._before)
            return Asked(asked.ids, asked.spans, "repeated")
        asked = self._short() if draw < REPEATED + SHORT else self._documents()
        self._before.append(asked)
        return asked

    def _short(self) -> Asked:
        words = " ".join(self._random.choices(SYSTEM.split() + QUESTION.split(), k=self._random.randrange(8, 60)))
        return Asked(tuple(self._tokenizer.encode_plain(words)), (), "short")

    def _documents(self) -> Asked:
        ids = self._tokenizer.encode_plain(f"{SYSTEM}\n\n")
        spans: list[tuple[int, int]] = []
        kind = "stored"
        for _ in range(self._random.randrange(1, 7)):
            chunk = self._random.choice(self.stored)
            if self._random.random() < UNSTORED:
                fresh, size = self._random.choice(self._fresh), self._random.choice(SIZES)
                first = self._random.randrange(len(fresh) - size + 1)
                chunk, kind = fresh[first : first + size], "partly stored"
            if len(ids) + len(chunk) > self._longest:
                break
            spans.append((len(ids), len(chunk)))
            ids += chunk
        ids += self._tokenizer.encode_plain(f"\n\nQuestion: {self._random.randrange(10**6)} {QUESTION}\nAnswer:")
        return Asked(tuple(ids), tuple(spans), kind)


@dataclass(frozen=True)
class Bench:
    """The engine with its controller, as the gateway has them."""

    service: "EngineService"
    reuser: "Reuser"
    controller: "Controller"
    served: "Beginnings"

    def run(self, way: str, asked: Asked, seen: Seen) -> None:
        from promptsluice.backend_engine import GenerationRequest, SamplingParams
        from promptsluice.backend_engine.types import Blending
        from promptsluice.kv_reuse.controller import Way
        from promptsluice.kv_reuse.repeats import marks_of

        began = time.perf_counter()
        reuse, choice, blending = None, None, None
        if way == ALWAYS:
            reuse = self.reuser.plan(asked.ids, asked.spans, mode="blend", ratio=RATIO).reuse
        elif way == CONTROLLED and asked.spans:
            reuse, choice = self._decided(asked, seen)
            blending = Blending(SELECTOR, RATIO) if choice is not None and choice.way in (Way.BLEND, Way.KEPT) else None
        params = SamplingParams(temperature=0.0, max_tokens=1)
        result = self.service.run(
            GenerationRequest(ids=asked.ids, sampling=params, reuse=reuse, blending=blending, namespace=way)
        )
        seen.ttft[way].append((time.perf_counter() - began) * 1e3)
        if way == CONTROLLED:
            self.controller.ran(result.work, choice)
            marks = marks_of(asked.ids, tenant=CONTROLLED)
            if reuse is not None and not result.blended_tokens:
                self.served.add(marks)
            elif choice is not None and choice.repeated:
                self.served.forget(marks)
            if choice is not None and choice.seconds:
                seen.errors.append(abs(result.work.seconds / choice.seconds - 1))

    def _decided(self, asked: Asked, seen: Seen) -> "tuple[Reuse | None, Choice | None]":
        from dataclasses import replace

        from promptsluice.backend_engine.types import Blending
        from promptsluice.kv_reuse import AUTO
        from promptsluice.kv_reuse.controller import Way
        from promptsluice.kv_reuse.repeats import marks_of
        from promptsluice.kv_reuse.work import Prompt

        prefix = self.service.known_tokens(asked.ids, namespace=CONTROLLED)
        kept = self.service.known_tokens(asked.ids, namespace=CONTROLLED, blending=Blending(SELECTOR, RATIO))
        left = [(start, length) for start, length in asked.spans if start + length > max(prefix, kept)]
        prompt = Prompt(tokens=len(asked.ids), prefix=prefix, spans=tuple(left), kept=kept)
        if kept <= prefix and not self.controller.promising(prompt, mode="blend", ratio=RATIO, repair=AUTO):
            seen.ways[Way.UNTOUCHED] += 1
            return None, None
        began = time.perf_counter()
        plan = self.reuser.plan(asked.ids, left, mode="blend", ratio=RATIO)
        tokens = Counter[str]()
        for hit in plan.hits:
            tokens[hit.tier] += hit.tokens
        wanted = sum(length for _, length in left)
        self.controller.loaded(tokens, wanted=wanted, seconds=time.perf_counter() - began)
        found = replace(prompt, spans=tuple((hit.start, hit.tokens) for hit in plan.hits))
        seen_before = self.served.sights(marks_of(asked.ids, tenant=CONTROLLED))
        choice = self.controller.choose(found, mode="blend", ratio=RATIO, repair=AUTO, more=True, seen=seen_before)
        seen.ways[choice.way] += 1
        return (replace(plan.reuse, ratio=choice.ratio) if plan.reuse and choice.way is Way.BLEND else None), choice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt's documents")
    parser.add_argument("--ways", nargs="+", choices=(FULL, CONTROLLED, ALWAYS), default=[FULL, CONTROLLED, ALWAYS])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    # Must be set before torch is loaded: threads that spin while they wait steal time on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run(options, Console(width=140))


def run(options: argparse.Namespace, console: Console) -> None:
    import torch
    from promptsluice.backend_engine import load_model
    from promptsluice.backend_engine.engine import Engine
    from promptsluice.backend_engine.service import EngineService
    from promptsluice.kv_reuse import RamStore, Reuser
    from promptsluice.kv_reuse.calibration import measured
    from promptsluice.kv_reuse.controller import Controller
    from promptsluice.kv_reuse.repeats import Beginnings
    from promptsluice.kv_reuse.work import Counter as WorkCounter

    torch.set_num_threads(options.threads)
    console.print(machine())
    model = load_model(options.model, device=options.device)
    assert model.tokenizer is not None, "the benchmark needs texts"
    chunks = read_chunks(options.folder, model.tokenizer, count=24, tokens=max(SIZES))
    engine = Engine(model)
    service = EngineService(engine)
    service.start()
    try:
        reuser = Reuser(
            service, RamStore(4 << 30), spec=model.spec, fingerprint=model.fingerprint, device=options.device
        )
        counter = WorkCounter(layers=model.spec.layers, step_tokens=engine.options.step_tokens)
        bench = Bench(service, reuser, Controller(counter), Beginnings())
        drawn = Drawn(model.tokenizer, chunks, longest=options.longest)
        reuser.warm(drawn.stored)
        began = time.perf_counter()
        bench.controller.calibrate(measured(model.decoder))
        console.print(f"measuring at the start took {time.perf_counter() - began:.1f} s")
        seen, kinds, order = Seen(), [], random.Random(1)
        for _ in track(range(options.prompts), description="prompts", transient=True, console=console):
            asked = drawn.next()
            kinds.append(asked.kind)
            for way in order.sample(options.ways, len(options.ways)):
                bench.run(way, asked, seen)
    finally:
        service.stop()
    console.print(table_of(seen, kinds, options.ways))
    console.print(summary(seen, kinds))


def table_of(seen: Seen, kinds: list[str], ways: list[str]) -> Table:
    table = Table("prompts", "number", *(f"{way}, s" for way in ways), title="sum of times to first token")
    for kind in (*dict.fromkeys(kinds), "all"):
        places = [place for place, other in enumerate(kinds) if kind in (other, "all")]
        sums = [sum(seen.ttft[way][place] for place in places) / 1e3 for way in ways]
        table.add_row(kind, str(len(places)), *(f"{total:.2f}" for total in sums))
    return table


def summary(seen: Seen, kinds: list[str]) -> str:
    ways = ", ".join(f"{way} {count}" for way, count in sorted(seen.ways.items()))
    lines = [f"decided where there are chunks: {ways}"]
    if seen.errors:
        lines.append(f"predictions: median error {statistics.median(seen.errors):.1%} of {len(seen.errors)}")
    if seen.ttft[FULL] and seen.ttft[CONTROLLED]:
        share = sum(seen.ttft[CONTROLLED]) / sum(seen.ttft[FULL])
        slower = [one / other for one, other in zip(seen.ttft[CONTROLLED], seen.ttft[FULL], strict=True)]
        worst, kind = max(zip(slower, kinds, strict=True))
        lines.append(
            f"controller / full prefill: {share:.3f} of the sums (at most 1.03), worst prompt {worst:.2f} ({kind})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
