"""What chunk reuse and blending cost in quality: full prefill, reuse after each anchor, and each selector and ratio.

Run: python benchmarks/blend_quality.py FOLDER [--questions 100] [--device cuda] [--json FILE]

FOLDER has hotpotqa_100/hotpotqa_distractor_100.jsonl (a line: question, answer, supporting_facts, context) and
xquad/xquad.en.json (SQuAD's form). Passages are chunks, in an order from a fixed seed; the chat is the gateway's. For
each way: the mean negative log-likelihood of a gold answer's token in nats; the KL divergence from full prefill of the
answer's first token, and the mean over all its tokens; the share of 16 greedy tokens that are full prefill's; the F1 of
these with the gold answer; how much of the gap between bare reuse and full prefill is closed. 95 % intervals are of a
bootstrap over questions. On a CPU take a few: --questions 12 --passages 4 --cut 100 --ratios 0.05 0.15.
Not here: speed.
"""

import argparse
import json
import os
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blend_cases import NEAREST, RUNGS, Case, case_of, questions
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from blend_forward import Outcome, Way
    from promptsluice.backend_engine import ChatTokenizer, LoadedModel
    from promptsluice.kv_reuse import Repair
    from torch import Tensor

GREEDY = 16
RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30)
ANCHORS = (
    "bare",
    "BOS",
    "template",
    "prefix",
    "prefix + block",
    "filler",
    "prefix + filler",
    "prefix + filler in a block",
    *RUNGS,
    NEAREST,
)
BLENDED_AFTER = ("bare", "filler", *RUNGS, NEAREST)
METHODS = (
    "deviation of V",
    "deviation of K",
    "deviation of V, layer 3",
    "chunk heads",
    "random",
    "query attention",
    "query attention, all layers",
    "query attention + 4 heads",
    "query attention, from a third",
    "query attention, from half",
    "query attention, a quarter to a half",
    "query attention, a third to two thirds",
    "query attention, two looks",
)
TWICE = METHODS[-1]
METRICS = ("nll", "kl", "kl_answer", "agreement", "f1")
MEASURED = ("NLL", "KL", "KL, answer", "agreement", "F1")
COLUMNS = ("anchor", "recomputed", *MEASURED, "NLL gap closed", "KL gap closed", "KL gap closed, answer")
RESAMPLES = 2000
Values = NDArray[np.float64]  # [questions, metrics]


def methods() -> dict[str, "Repair"]:
    """The ways to name the rows that are recomputed."""
    from promptsluice.kv_reuse import ChunkHeads, KVDeviation, QueryAttention, Repair

    repairs = (
        Repair(KVDeviation(on="v")),
        Repair(KVDeviation(on="k")),
        Repair(KVDeviation(layer=3)),
        Repair(chooser=ChunkHeads()),
        Repair(chooser=RandomPlaces()),
        Repair(chooser=QueryAttention()),
        Repair(chooser=QueryAttention(depth=0.0)),
        Repair(chooser=QueryAttention(heads=4)),
        Repair(chooser=QueryAttention(depth=1 / 3)),
        Repair(chooser=QueryAttention(depth=0.5)),
        Repair(chooser=QueryAttention(depth=1 / 4, until=1 / 2)),
        Repair(chooser=QueryAttention(depth=1 / 3, until=2 / 3)),
        Repair(chooser=QueryAttention()),
    )
    return dict(zip(METHODS, repairs, strict=True))


class RandomPlaces:
    """Any rows: what a method must beat."""

    depth: None = None
    until = 1.0

    def choose(self, *, attention: object, offsets: "Tensor", quota: int) -> "Tensor":
        import torch

        return torch.randperm(len(offsets), generator=torch.Generator().manual_seed(0))[:quota]


def ends() -> tuple["Way", "Way"]:
    """Full prefill, and bare reuse: the gap is between them."""
    from blend_forward import Way

    return Way(None, "full"), Way("bare")


def ways(
    chosen: Sequence[str], anchors: Sequence[str], ratios: Sequence[float], plain: Sequence[str]
) -> list[tuple["Way", "Repair"]]:
    from blend_forward import Way
    from promptsluice.kv_reuse import Repair

    unrepaired = [ends()[0], *(Way(anchor) for anchor in dict.fromkeys(("bare", *plain)))]
    blended = [
        (Way(anchor, method, ratio, 2 if method == TWICE else 1), methods()[method])
        for anchor in anchors
        for method in chosen
        for ratio in ratios
    ]
    return [*((way, Repair()) for way in unrepaired), *blended]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sets", nargs="+", choices=("hotpotqa", "xquad"), default=["hotpotqa", "xquad"])
    parser.add_argument("--questions", type=int, default=100, help="of each set")
    parser.add_argument("--passages", type=int, default=10, help="of a question, at most")
    parser.add_argument("--cut", type=int, default=400, help="tokens of a passage, at most")
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=METHODS)
    parser.add_argument("--anchors", nargs="+", choices=ANCHORS, default=BLENDED_AFTER, help="of the blended chunks")
    parser.add_argument("--plain", nargs="+", choices=ANCHORS, default=ANCHORS, help="of chunks used as stored")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, help="ways in one forward (8 on a CPU, 48 elsewhere)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="write each question's figures to this file")
    options = parser.parse_args()
    # Must be set before torch is loaded: threads that spin while they wait steal time on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run(options, Console(width=200, soft_wrap=True))


def run(options: argparse.Namespace, console: Console) -> None:
    import torch
    from promptsluice.backend_engine import load_model

    torch.set_num_threads(options.threads)
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    assert model.tokenizer is not None, "the benchmark needs texts"
    for name in options.sets:
        asked = questions(options.folder, name, count=options.questions, passages=options.passages, seed=options.seed)
        cases = [case_of(question, model.tokenizer, cut=options.cut) for question in asked]
        figures = measured(cases, model, options, label=name)
        tokens = sum(len(case.ids) for case in cases) / len(cases)
        where = f"{options.model}, {options.dtype}, {options.device}, torch {torch.__version__}"
        console.print(f"\n{name}: {len(cases)} questions, {tokens:.0f} tokens a prompt on average; {where}\n")
        console.print("\n".join(table(figures)), markup=False)
        if options.json is not None:
            write(options.json, name, figures)


def measured(
    cases: list[Case], model: "LoadedModel", options: argparse.Namespace, *, label: str
) -> dict["Way", Values]:
    from blend_forward import Bench

    together = options.together or (8 if options.device == "cpu" else 48)
    longest = max(len(case.ids) + max(len(case.answer), GREEDY) for case in cases)
    before = max(len(anchor) for case in cases for anchors in case.anchors.values() for anchor in anchors)
    longest = max(longest, before + options.cut + 8)
    bench, all_ways = (
        Bench(model, together=together, tokens=longest),
        ways(options.methods, options.anchors, options.ratios, options.plain),
    )
    anchors = dict.fromkeys(way.anchor for way, _ in all_ways if way.anchor is not None)
    rows: list[list[tuple[float, ...]]] = []
    for case in track(cases, description=label, transient=True):
        chunks = {anchor: bench.chunks(case, anchor) for anchor in anchors}
        outcomes = bench.run(case, all_ways, chunks, tokens=GREEDY)
        assert model.tokenizer is not None
        rows.append([scored(case, outcome, outcomes[0], model.tokenizer) for outcome in outcomes])
    figures = np.asarray(rows)
    return {way: figures[:, number] for number, (way, _) in enumerate(all_ways)}


def scored(case: Case, outcome: "Outcome", full: "Outcome", tokenizer: "ChatTokenizer") -> tuple[float, ...]:
    """The METRICS of one question."""
    nll = -sum(float(row[token]) for row, token in zip(outcome.logprobs, case.answer, strict=True)) / len(case.answer)
    kl = (full.logprobs.exp() * (full.logprobs - outcome.logprobs)).sum(-1)
    agreement = sum(a == b for a, b in zip(outcome.greedy, full.greedy, strict=True)) / len(full.greedy)
    answer = re.split('["\n]', tokenizer.decode(outcome.greedy))[0]
    return nll, float(kl[0]), float(kl.mean()), agreement, f1(answer, case.gold)


def f1(answer: str, gold: str) -> float:
    """Token overlap as SQuAD counts it."""
    one, other = normalized(answer), normalized(gold)
    common = (Counter(one) & Counter(other)).total()
    return 2 * common / (len(one) + len(other)) if common else 0.0


def normalized(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def table(figures: dict["Way", Values]) -> Iterator[str]:
    """Markdown lines."""
    full, bare = (figures[way] for way in ends())
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    draws = np.random.default_rng(0).integers(len(full), size=(RESAMPLES, len(full)))
    for way, values in figures.items():
        cells = [interval(values[:, column], draws) for column in range(len(METRICS))]
        cells += [closed(values[:, column], bare[:, column], full[:, column], draws) for column in (0, 1, 2)]
        what = way.method if way.anchor is None or not way.ratio else f"{way.method}, {way.ratio:.0%}"
        yield f"| {way.anchor or ''} | {what} | {' | '.join(cells)} |"


def interval(values: Values, draws: NDArray[np.int64]) -> str:
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


def closed(values: Values, bare: Values, full: Values, draws: NDArray[np.int64]) -> str:
    """The share of the gap in the means; with a small gap it says little, and its interval shows that."""
    gaps = (bare - full)[draws].mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (bare - values)[draws].mean(axis=1) / gaps
    low, high = np.nanpercentile(shares, [2.5, 97.5])
    gap = (bare - full).mean()
    return f"{(bare - values).mean() / gap:.1%} ({low:.0%} to {high:.0%})" if gap else ""


def write(path: Path, name: str, figures: dict["Way", Values]) -> None:
    """Add a set's figures to the file: for each way the metrics of each question."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[name] = [
        {
            "anchor": way.anchor,
            "method": way.method,
            "ratio": way.ratio,
            "metrics": METRICS,
            "questions": values.tolist(),
        }
        for way, values in figures.items()
    ]
    path.write_text(json.dumps(known), encoding="utf-8")


if __name__ == "__main__":
    main()
