"""Compressors beside LLMLingua and headroom's text crusher: what they cost, what they leave, what survives.

Run: python benchmarks/compress.py DATA [--llmlingua PYTHON] [--headroom PYTHON] [--texts 3] [--chars 4000] [--dtype D]
     python benchmarks/compress.py DATA --short 1000 --chars 1000 ...     protected text in 1,000 short samples

DATA is a folder with qmsum, hotpotqa_100, kv_retrieval, bfcl, tau_bench and fastapi_docs. The peers are interpreters of
environments with `llmlingua==0.2.2 transformers<=4.47.1 torch`, and with `headroom-ai`; each runs in a process of its
own, with the same weights of the same model and one thread, as we do. All take the same text in turn, so that a busy
machine slows all of them. Figures are medians over texts; times are the processor's, in ms for 1,000 tokens of input.
`reached` is the median rate, `off` how many texts' rates are off by more than 3 % of what was asked, above or below;
`exact lost` are identifiers, numbers, dates and addresses; `JSON`, `facts` and `gold` what of them is still there.
Of short samples whose rate is above what was asked, `must stay` says in how many our compressors name more tokens that
must stay.

With `--rows FILE` what a subject made of a text is kept, with its time, and not made again: a long run may be stopped
and begun again, and subjects may be run one after another, though their times are then not comparable.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from compress_cases import CORPORA, Case, cases, lost, parsed, samples
from compress_subjects import Machinery, Outcome, Subject, common_options, heading, opened
from rich.console import Console
from rich.progress import track
from rich.table import Table

CLOSE = 0.03
MISSED = "the target rate was missed"  # what our compressors say where more must stay than was asked for


@dataclass(frozen=True)
class Reading:
    """One text through one subject. Rates in tokens of the model."""

    case: Case
    outcome: Outcome
    tokens: int
    rate: float
    asked: float

    @property
    def cost(self) -> float:
        return 1e6 * self.outcome.cpu / self.tokens

    @property
    def off(self) -> bool:
        return abs(self.rate - self.asked) > CLOSE * self.asked


def main() -> None:
    options = _options()
    found = {
        corpus: cases(options.data, corpus, count=options.texts, chars=options.chars) for corpus in options.corpora
    }
    console = Console(width=150)
    console.print(f"{heading(options)}, {options.texts} texts of each collection")
    with opened(options) as (machinery, subjects):
        if options.short:
            _print_short(console, machinery, subjects, options)
        else:
            _print_all(console, machinery, subjects, found, options.rates)


def _print_all(
    console: Console,
    machinery: Machinery,
    subjects: Sequence[Subject],
    found: dict[str, list[Case]],
    rates: Sequence[float],
) -> None:
    first = next(case for group in found.values() for case in group)
    for subject in subjects:  # whatever is loaded or compiled once
        subject.compress(first.text[:600], question=first.question, rate=0.5)
    passes = [machinery.plain_pass(case.text) for group in found.values() for case in group]
    floor = statistics.median(1e6 * seconds / tokens for seconds, tokens in passes)
    console.print(f"one prefill of our engine without any logits: {floor:.0f} ms for 1,000 tokens")
    costs: dict[str, list[float]] = defaultdict(list)
    for corpus, group in found.items():
        table = _table(corpus, group, machinery)
        for rate in rates:
            readings = _readings(machinery, subjects, group, rate)
            for name, those in readings.items():
                _row(table, name, rate, those)
                costs[name] += [one.cost for one in those]
        console.print(table)
    medians = {name: statistics.median(values) for name, values in costs.items()}
    for name, cost in medians.items():
        beside = "".join(f", {medians[peer] / cost:.1f} times as fast as {peer}" for peer in ("llmlingua", "headroom")
                         if peer in medians and name not in ("llmlingua", "headroom"))  # fmt: skip
        console.print(f"{name}: {cost:.0f} ms for 1,000 tokens{beside}; {cost / floor:.2f} prefills")


def _readings(
    machinery: Machinery, subjects: Sequence[Subject], group: Sequence[Case], rate: float
) -> dict[str, list[Reading]]:
    readings: dict[str, list[Reading]] = {subject.name: [] for subject in subjects}
    for case in group:
        tokens = machinery.count(case.text)
        for subject in subjects:
            outcome = subject.compress(case.text, question=case.question, rate=rate)
            asked = 0.65 if subject.name == "balanced" else rate
            after = machinery.count(outcome.text) / tokens
            readings[subject.name].append(Reading(case, outcome, tokens, after, asked))
    return readings


def _table(corpus: str, group: Sequence[Case], machinery: Machinery) -> Table:
    sizes = [machinery.count(case.text) for case in group]
    table = Table(title=f"{corpus}: texts of {min(sizes)} to {max(sizes)} tokens", title_justify="left")
    for column in ("", "asked", "reached", "off", "ms / 1,000", "exact lost", "JSON", "facts", "gold", "failed"):
        table.add_column(column, justify="right" if column else "left")
    return table


def _row(table: Table, name: str, rate: float, readings: Sequence[Reading]) -> None:
    exact = sum(len(dict.fromkeys(one.case.exact)) for one in readings)
    gone = sum(len(lost(one.case, one.outcome.text)) for one in readings)
    documents = [value in parsed(one.outcome.text) for one in readings for value in one.case.json]
    facts = [(one, fact) for one in readings for fact in one.case.facts]
    gold = [one for one in readings if one.case.gold]
    table.add_row(
        name,
        f"{readings[0].asked:.2f}",
        f"{statistics.median(one.rate for one in readings):.3f}",
        f"{sum(one.off for one in readings)}/{len(readings)}",
        f"{statistics.median(one.cost for one in readings):.1f}",
        f"{gone}/{exact}",
        _share(documents),
        _share([fact in one.outcome.text for one, fact in facts]),
        _share([one.case.gold in one.outcome.text for one in gold]),
        str(sum(bool(one.outcome.error) for one in readings)),
    )


def _share(kept: Sequence[bool]) -> str:
    return f"{sum(kept)}/{len(kept)}" if kept else "-"


@dataclass
class _Harm:
    """What a subject did to short samples: how many lost anything exact, and how many things; rates that are off, and
    how many of those are above because more must stay than was asked for.
    """

    samples: int = 0
    harmed: int = 0
    gone: int = 0
    exact: int = 0
    off: int = 0
    above: int = 0
    must: int = 0

    def add(self, case: Case, outcome: Outcome, rate: float, asked: float) -> None:
        missing, things = len(lost(case, outcome.text)), len(set(case.exact))
        self.samples += 1
        self.harmed += bool(missing)
        self.gone += missing
        self.exact += things
        self.off += abs(rate - asked) > CLOSE * asked
        above = rate > (1 + CLOSE) * asked
        self.above += above
        self.must += above and MISSED in outcome.note


def _print_short(
    console: Console, machinery: Machinery, subjects: Sequence[Subject], options: argparse.Namespace
) -> None:
    """Short samples of all collections: in how many of them anything exact was lost."""
    drawn = samples(options.data, options.corpora, count=options.short, chars=options.chars)
    rate = options.rates[0]
    harms = {subject.name: _Harm() for subject in subjects}
    try:
        for case in track(drawn, description="samples"):
            outcomes = [subject.compress(case.text, question=case.question, rate=rate) for subject in subjects]
            for subject, outcome in zip(subjects, outcomes, strict=True):
                reached = machinery.count(outcome.text) / machinery.count(case.text)
                harms[subject.name].add(case, outcome, reached, 0.65 if subject.name == "balanced" else rate)
    except KeyboardInterrupt:
        console.print("stopped before the end")
    table = Table(title=f"{len(drawn)} samples, a rate of {rate} asked (balanced: 0.65)", title_justify="left")
    for column in ("", "samples that lost something exact", "lost", "rate off by more than 3 %", "above", "must stay"):
        table.add_column(column, justify="right" if column else "left")
    for name, harm in harms.items():
        harmed, gone = f"{harm.harmed}/{harm.samples}", f"{harm.gone}/{harm.exact}"
        table.add_row(name, harmed, gone, f"{harm.off}/{harm.samples}", str(harm.above), str(harm.must))
    console.print(table)


def _options() -> argparse.Namespace:
    ours = ["perplexity", "contrast", "extractive", "balanced", "lossless"]
    parser = common_options(__doc__ or "", compared=ours)
    parser.add_argument("--corpora", nargs="+", choices=list(CORPORA), default=list(CORPORA))
    parser.add_argument("--texts", type=int, default=3, help="of each collection")
    parser.add_argument("--chars", type=int, default=4000, help="of a text, at most")
    parser.add_argument("--short", type=int, default=0, help="samples for the count of lost text, instead of all else")
    return parser.parse_args()


if __name__ == "__main__":
    main()
