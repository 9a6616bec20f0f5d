"""What compression costs downstream: questions answered from full and from compressed documents, by the same model.

Run: python benchmarks/compress_quality.py DATA [--llmlingua PYTHON] [--headroom PYTHON] [--questions 40] [--chars 3000]
     [--ours perplexity contrast extractive ...] [--rates 0.5 0.33]

DATA has hotpotqa_100 (a line: question, answer, supporting_facts, context). Of each question the gold passages and some
others are one document, in a seeded order. For each way: the rate reached, the mean negative log-likelihood of a gold
answer's token in nats and how much more that is than with the full document, and the F1 of 16 greedy tokens with the
gold answer; 95 % intervals are of a bootstrap over questions. `--ours` takes any compressor by name, with its defaults.
The peers are interpreters of their own environments, as for compress.py. Not here: speed.
"""

import argparse
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from blend_cases import LEAD, SYSTEM
from blend_quality import f1
from compress_cases import Case, cases
from compress_subjects import Machinery, common_options, heading, opened, seeded_mean
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.types import GenerationRequest
from rich.console import Console
from rich.progress import track
from rich.table import Table

GREEDY = 16


@dataclass(frozen=True)
class Reading:
    rate: float
    nll: float
    f1: float


def main() -> None:
    options = _options()
    found = cases(options.data, "hotpotqa_100", count=options.questions, chars=options.chars)
    readings: dict[tuple[str, float], list[Reading]] = {("full", 1.0): []}
    with opened(options) as (machinery, subjects):
        for case in track(found, description="questions"):
            readings["full", 1.0].append(_reading(machinery, case, case.text))
            for subject in subjects:
                for rate in options.rates:
                    text = subject.compress(case.text, question=case.question, rate=rate).text
                    readings.setdefault((subject.name, rate), []).append(_reading(machinery, case, text))
        _print(readings, found, machinery, options)


def _reading(machinery: Machinery, case: Case, text: str) -> Reading:
    tokenizer = machinery.tokenizer
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{text}\n\n{case.question}"}]
    ids = (*tokenizer.encode_chat(messages).ids, *tokenizer.encode_plain(LEAD))
    answer = tuple(tokenizer.encode_plain(case.gold))
    told = machinery.service.run(
        GenerationRequest(
            ids=(*ids, *answer),
            sampling=SamplingParams(max_tokens=0),
            prompt_logprobs=True,
            scored=range(len(ids), len(ids) + len(answer)),
            prefix_cache=False,
        )
    ).prompt_logprobs
    assert told is not None, "the engine was asked for prompt_logprobs"
    said = re.split('["\n]', machinery.greedy(ids, GREEDY))[0]
    rate = tokenizer.count(text) / tokenizer.count(case.text)
    return Reading(rate, -float(told[-len(answer) :].mean()), f1(said, case.gold))


def _print(
    readings: dict[tuple[str, float], list[Reading]],
    found: Sequence[Case],
    machinery: Machinery,
    options: argparse.Namespace,
) -> None:
    size = statistics.median(machinery.count(case.text) for case in found)
    console = Console(width=120)
    console.print(f"{heading(options)}, {len(found)} questions, documents of {size:.0f} tokens (median)")
    table = Table()
    for column in ("", "asked", "reached", "NLL", "more than full", "F1"):
        table.add_column(column, justify="right" if column else "left")
    full = readings["full", 1.0]
    for (name, rate), those in readings.items():
        more = [one.nll - base.nll for one, base in zip(those, full, strict=True)]
        table.add_row(
            name,
            f"{rate:.2f}",
            f"{statistics.median(one.rate for one in those):.3f}",
            _interval([one.nll for one in those]),
            "-" if those is full else _interval(more),
            _interval([one.f1 for one in those]),
        )
    console.print(table)


def _interval(values: Sequence[float]) -> str:
    mean, low, high = seeded_mean(values)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _options() -> argparse.Namespace:
    parser = common_options(__doc__ or "", compared=["perplexity", "contrast", "extractive"])
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--chars", type=int, default=3000, help="of a document, at most")
    return parser.parse_args()


if __name__ == "__main__":
    main()
