"""What compression costs downstream: questions answered from full and from compressed documents, by the same model.

Run: python benchmarks/compress_quality.py DATA [--llmlingua PYTHON] [--headroom PYTHON] [--questions 40] [--chars 3000]
     [--ours perplexity contrast extractive summarize ...] [--rates 0.5 0.33] [--rows FILE]

DATA has hotpotqa_100 (a line: question, answer, supporting_facts, context). Of each question the gold passages and some
others are one document, in a seeded order. For each way: the rate reached, the mean negative log-likelihood of a gold
answer's token in nats, how much more that is than with the full document and than with llmlingua's, question by
question, and the F1 of 16 greedy tokens with the gold answer; 95 % intervals are of a bootstrap over questions.
`gold` says in how many documents the answer still stands, `written` in how many a model's summary does.
`--ours` takes any compressor by name, with its defaults; `summarize` asks the same model, and `summary` takes its words
without the facts that they lost. The peers are interpreters of their own environments, as for compress.py. With
`--rows` a run may be stopped and begun again, and parts of it made in any order; where it is stopped, what was read so
far is printed. Not here: speed.
"""

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from blend_cases import LEAD, SYSTEM
from blend_quality import f1
from compress_cases import Case, cases, stands
from compress_subjects import Machinery, Subject, common_options, heading, opened, seeded_mean
from kept_rows import KeptRows
from promptsluice.backend_engine.params import SamplingParams
from promptsluice.backend_engine.types import GenerationRequest
from promptsluice.compressors.summary.summarize import MARK
from rich.console import Console
from rich.progress import track
from rich.table import Table

GREEDY = 16
_SUMMARY = MARK.split("{")[0]  # begins what a model wrote


@dataclass(frozen=True)
class Reading:
    """One question with one document: nats for a token of the gold answer, and the F1 of what was answered."""

    nll: float
    f1: float


@dataclass(frozen=True)
class Way:
    """What became of some questions' documents: `texts`, `rates` in tokens, and `readings` question by question."""

    name: str
    asked: float
    texts: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    @property
    def nll(self) -> list[float]:
        return [one.nll for one in self.readings]


def main() -> None:
    options = _options()
    found = cases(options.data, "hotpotqa_100", count=options.questions, chars=options.chars)
    rows = KeptRows(options.rows)
    with opened(options) as (machinery, subjects):
        ways = [Way("full", 1.0)]
        ways += [Way(subject.name, rate) for rate in options.rates for subject in subjects]
        read = 0
        try:
            for case in track(found, description="questions"):
                told = list(_told(machinery, case, subjects, options.rates, rows))
                for way, (text, rate, reading) in zip(ways, told, strict=True):
                    way.texts.append(text)
                    way.rates.append(rate)
                    way.readings.append(reading)
                read += 1
        except KeyboardInterrupt:
            print(f"stopped after {read} of {len(found)} questions")
        if read:
            _print(ways, found[:read], machinery, options)


def _told(
    machinery: Machinery, case: Case, subjects: Sequence[Subject], rates: Sequence[float], rows: KeptRows
) -> Iterator[tuple[str, float, Reading]]:
    """Text, rate and reading of the full document, then of each subject's at each rate."""
    whole = machinery.count(case.text)
    yield case.text, 1.0, _reading(machinery, case, case.text, rows)
    for rate in rates:
        for subject in subjects:
            text = subject.compress(case.text, question=case.question, rate=rate).text
            yield text, machinery.count(text) / whole, _reading(machinery, case, text, rows)


def _reading(machinery: Machinery, case: Case, text: str, rows: KeptRows) -> Reading:
    known = rows.get("reading", machinery.name, case.question, case.gold, text)
    if known is not None:
        return Reading(**known)
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
    said = re.split('["\n]', machinery.greedy(ids, GREEDY).text)[0]
    reading = Reading(-float(told[-len(answer) :].mean()), f1(said, case.gold))
    rows.put(asdict(reading), "reading", machinery.name, case.question, case.gold, text)
    return reading


def _print(ways: Sequence[Way], found: Sequence[Case], machinery: Machinery, options: argparse.Namespace) -> None:
    size = statistics.median(machinery.count(case.text) for case in found)
    console = Console(width=150)
    console.print(f"{heading(options)}, {len(found)} questions, documents of {size:.0f} tokens (median)")
    table = Table()
    peer = {way.asked: way for way in ways if way.name == "llmlingua"}
    for column in ("", "asked", "reached", "NLL", "more than full", "more than llmlingua", "F1", "gold", "written"):
        table.add_column(column, justify="right" if column else "left")
    for way in ways:
        table.add_row(
            way.name,
            f"{way.asked:.2f}",
            f"{statistics.median(way.rates):.3f}",
            _interval(way.nll),
            _more(way, ways[0]),
            _more(way, peer[way.asked]) if way.asked in peer else "-",
            _interval([one.f1 for one in way.readings]),
            str(sum(stands(case.gold, text) for case, text in zip(found, way.texts, strict=True))),
            str(sum(_SUMMARY in text for text in way.texts)) if way.name in ("summarize", "summary") else "-",
        )
    console.print(table)


def _more(way: Way, base: Way) -> str:
    """By how much an answer's NLL is worse than with the other's document, question by question."""
    if way is base:
        return "-"
    return _interval([one - other for one, other in zip(way.nll, base.nll, strict=True)])


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
