"""What chunks of 8 bits cost: blends over rounded chunks beside the same blends over chunks as the model computed them.

Run: python benchmarks/chunk_rounding.py FOLDER [--questions 12] [--passages 6] [--cut 200] [--device cuda]

FOLDER is that of blend_quality.py, whose prompts these are. For each set, dtype and recomputed share: the KL divergence
of the first token, and the mean over the answer's tokens, from the unrounded blend, and for scale that of the unrounded
blend from full prefill; the share of 16 greedy tokens that are the unrounded blend's; how much a gold answer's token
loses in nats. 95 % intervals are of a bootstrap over questions. Rows are chosen over the chunks as they are kept.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blend_cases import case_of, questions
from blend_quality import GREEDY, RESAMPLES, Values
from numpy.typing import NDArray
from rich.progress import track

if TYPE_CHECKING:
    from blend_forward import Outcome
    from promptsluice.kv_reuse.rounding import ChunkDtype

ANCHOR, RATIOS = "filler in a block", (0.0, 0.15)
DTYPES: "tuple[ChunkDtype, ...]" = ("int8", "fp8")
COLUMNS = ("set", "recomputed", "chunks", "KL, first token", "KL, answer", "agreement", "NLL", "KL of it from full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sets", nargs="+", choices=("hotpotqa", "xquad"), default=["hotpotqa", "xquad"])
    parser.add_argument("--questions", type=int, default=12, help="of each set")
    parser.add_argument("--passages", type=int, default=6, help="of a question, at most")
    parser.add_argument("--cut", type=int, default=200, help="tokens of a passage, at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name in options.sets:
        for line in measured(options, name):
            print(line, flush=True)


def measured(options: argparse.Namespace, name: str) -> Iterator[str]:
    """Markdown lines of a set."""
    import torch
    from blend_forward import Bench, Way
    from promptsluice.backend_engine import load_model
    from promptsluice.kv_reuse import QueryAttention, Repair

    torch.set_num_threads(options.threads)
    model = load_model(options.model, dtype="float32", device=options.device)
    assert model.tokenizer is not None, "the benchmark needs texts"
    asked = questions(options.folder, name, count=options.questions, passages=options.passages, seed=0)
    cases = [case_of(question, model.tokenizer, cut=options.cut) for question in asked]
    kinds: tuple[ChunkDtype, ...] = ("model", *DTYPES)
    blends = [
        (Way(kind, "query attention", ratio), Repair(chooser=QueryAttention())) for ratio in RATIOS for kind in kinds
    ]
    ways = [(Way(None, "full"), Repair()), *blends]
    longest = max(len(case.ids) + max(len(case.answer), GREEDY) for case in cases) + options.cut
    bench = Bench(model, together=len(ways), tokens=longest)
    rows: dict[Way, list[list[float]]] = {way: [] for way, _ in blends}
    for case in track(cases, description=name, transient=True):
        chunks = {kind: bench.chunks(case, ANCHOR, dtype=kind) for kind in kinds}
        outcomes = dict(zip((way for way, _ in ways), bench.run(case, ways, chunks, tokens=GREEDY), strict=True))
        full = outcomes[ways[0][0]]
        for way, _ in blends:
            exact = outcomes[Way("model", way.method, way.ratio)]
            rows[way].append(compared(outcomes[way], exact, full, case.answer))
    draws = np.random.default_rng(0).integers(len(cases), size=(RESAMPLES, len(cases)))
    for way, values in rows.items():
        if way.anchor != "model":
            cells = [interval(column, draws) for column in np.asarray(values).T]
            yield f"| {name} | {way.ratio:.0%} | {way.anchor} | {' | '.join(cells)} |"


def interval(values: Values, draws: NDArray[np.int64]) -> str:
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return f"{values.mean():.5f} ({low:.5f} to {high:.5f})"


def compared(one: "Outcome", exact: "Outcome", full: "Outcome", answer: tuple[int, ...]) -> list[float]:
    """The figures of one question, in the order of COLUMNS."""
    kl = (exact.logprobs.exp() * (exact.logprobs - one.logprobs)).sum(-1)
    blend = (full.logprobs.exp() * (full.logprobs - exact.logprobs)).sum(-1)
    same = sum(a == b for a, b in zip(one.greedy, exact.greedy, strict=True)) / len(exact.greedy)
    lost = sum(float(exact.logprobs[at, token] - one.logprobs[at, token]) for at, token in enumerate(answer)) / len(
        answer
    )
    return [float(kl[0]), float(kl.mean()), same, lost, float(blend[0])]


if __name__ == "__main__":
    main()
