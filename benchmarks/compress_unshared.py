"""What stays of answers that share no word with the question, where those who go by words have nothing to go by.

Run: python benchmarks/compress_unshared.py DATA [--headroom PYTHON] [--questions 60] [--chars 3000]
     [--ours extractive perplexity balanced] [--rates 0.5 0.33] [--rows FILE]

DATA has hotpotqa_100, qmsum and xquad. Of each set those questions are taken whose answer stands in the document, in
sentences none of which shares a word with the question, stop words aside: HotpotQA's passages, and XQuAD's paragraphs
of one article, in English, in Chinese, and asked in Chinese of English text. QMSum's answers are summaries, so that the
names and numbers of these that stand in the meeting are asked for, each by itself. Printed for each set, way and rate:
the rate reached (mean), the share of answers that stay, as no part of a longer word, with the 95 % interval of a
bootstrap over questions, beside it the share of those without digits, since ours leave numbers and dates alone whatever
is asked, and CPU-ms for 1,000 tokens (median). A question that a way failed at is left out of all ways at that rate,
and counted as `failed` where it failed. `at ours` is headroom, asked for the rate that the way named before it
has reached, text by text, as ours leave more where much is protected; `more` is what ours has more than that, question
by question. With `--rows` a run may be stopped and begun again.
"""

import argparse
import json
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress_cases import Case, cases, filled, stands
from compress_subjects import Machinery, Outcome, Subject, common_options, heading, opened, seeded_mean
from promptsluice.compressors.lexical import shared_with
from promptsluice.compressors.sentences import units_of
from rich.console import Console
from rich.progress import track
from rich.table import Table

_ALL = 100_000
_XQUAD = {"xquad en": ("en", "en"), "xquad zh": ("zh", "zh"), "xquad zh of en": ("en", "zh")}
SETS = ("hotpotqa_100", "qmsum", *_XQUAD)


@dataclass(frozen=True)
class Asked:
    """A question and those of its answers of which no sentence shares a word with it."""

    text: str
    question: str
    golds: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """Of one question: the rate reached, CPU-ms for 1,000 tokens, and of each answer whether it stays."""

    rate: float
    ms: float
    stays: dict[str, bool]


class Told:
    """By asked rate and way: what was left of the questions that no way failed at, and at how many each failed."""

    def __init__(self) -> None:
        self.left: dict[tuple[float, str], list[Left]] = defaultdict(list)
        self.failed: Counter[tuple[float, str]] = Counter()

    def add(self, other: "Told") -> None:
        for key, rows in other.left.items():
            self.left[key] += rows
        self.failed += other.failed


def unshared(text: str, question: str, gold: str) -> bool:
    """Whether an answer stands in sentences of a text, none of which shares a word with the question."""
    shared = shared_with(question)
    holding = [text[unit.start : unit.end] for unit in units_of(text) if stands(gold, text[unit.start : unit.end])]
    return bool(holding) and not any(map(shared, holding))


def asked(folder: Path, name: str, *, count: int, chars: int) -> list[Asked]:
    """The first `count` such questions of a set, in a seeded order."""
    found = _xquad(folder, name, chars) if name in _XQUAD else cases(folder, name, count=_ALL, chars=chars)
    chosen: list[Asked] = []
    for case in found:
        golds = tuple(gold for gold in (case.facts if name == "qmsum" else (case.gold,)) if gold)
        golds = tuple(gold for gold in golds if unshared(case.text, case.question, gold))
        if golds:
            chosen.append(Asked(case.text, case.question, golds))
    return chosen[:count]


def _xquad(folder: Path, name: str, chars: int) -> list[Case]:
    written, spoken = (
        json.loads((folder / "xquad" / f"xquad.{language}.json").read_text(encoding="utf-8"))["data"]
        for language in _XQUAD[name]
    )
    found: list[Case] = []
    for article, questions in zip(written, spoken, strict=True):
        paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
        for n, (paragraph, other) in enumerate(zip(article["paragraphs"], questions["paragraphs"], strict=True)):
            text = filled(paragraphs, n, chars, joint="\n\n")
            for told, posed in zip(paragraph["qas"], other["qas"], strict=True):
                found.append(Case(name, text, posed["question"], gold=told["answers"][0]["text"]))
    random.Random(f"0 {name}").shuffle(found)
    return found


def main() -> None:
    options = _options()
    console = Console(width=150)
    with opened(options) as (machinery, subjects):
        console.print(f"{heading(options)}, documents of up to {options.chars} characters")
        whole = Told()
        for name in options.sets:
            found = asked(options.data, name, count=options.questions, chars=options.chars)
            try:
                told = _measured(found, machinery, subjects, options.rates)
            except KeyboardInterrupt:
                console.print(f"stopped in {name}")
                break
            _print(console, name, told)
            whole.add(told)
        if len(options.sets) > 1:
            _print(console, "all sets", whole)


def _measured(
    found: Sequence[Asked], machinery: Machinery, subjects: Sequence[Subject], rates: Sequence[float]
) -> Told:
    told = Told()
    peer = next((one for one in subjects if one.name == "headroom"), None)
    for one in track(found, description="questions", transient=True):
        for rate in rates:
            made: dict[str, Outcome] = {}
            for subject in subjects:
                outcome = made[subject.name] = subject.compress(one.text, question=one.question, rate=rate)
                if peer is not None and subject is not peer and not outcome.error:
                    reached = _left(one, outcome, machinery).rate
                    again = peer.compress(one.text, question=one.question, rate=round(reached, 3))
                    made[_beside(subject.name)] = again
            failed = [way for way, outcome in made.items() if outcome.error]
            told.failed.update((rate, way) for way in failed)
            for way, outcome in made.items():
                told.left[rate, way] += [] if failed else [_left(one, outcome, machinery)]
    return told


def _left(one: Asked, made: Outcome, machinery: Machinery) -> Left:
    tokens = machinery.count(one.text)
    stays = {gold: stands(gold, made.text) for gold in one.golds}
    return Left(machinery.count(made.text) / tokens, 1e6 * made.cpu / tokens, stays)


def _print(console: Console, name: str, told: Told) -> None:
    left = told.left
    number = max(map(len, left.values()), default=0)
    table = Table(title=f"{name}: {number} questions")
    for column in ("asked", "way", "reached", "answers", "stay", "more", "without digits", "stay", "CPU-ms", "failed"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for (rate, way), found in left.items():
        words = [{gold: stays for gold, stays in one.stays.items() if not _digits(gold)} for one in found]
        table.add_row(
            f"{rate:.2f}",
            way,
            f"{statistics.mean(one.rate for one in found):.3f}" if found else "-",
            *_share([one.stays for one in found]),
            _more(found, left.get((rate, _beside(way)), ())),
            *_share(words),
            f"{statistics.median(one.ms for one in found):.1f}" if found else "-",
            str(told.failed[rate, way]),
        )
    console.print(table)


def _beside(way: str) -> str:
    return f"{way}: at ours"


def _more(found: Sequence[Left], others: Sequence[Left]) -> str:
    """By how much more of a question's answers stay, question by question."""
    if not others:
        return "-"
    pairs = zip(found, others, strict=True)
    shares = [statistics.mean(one.stays.values()) - statistics.mean(other.stays.values()) for one, other in pairs]
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*seeded_mean(shares))


def _digits(gold: str) -> bool:
    return any(char.isdigit() for char in gold)


def _share(found: Sequence[dict[str, bool]]) -> Iterator[str]:
    """How many answers, and of each question's the mean share that stays."""
    some = [list(one.values()) for one in found if one]
    yield str(sum(map(len, some)))
    mean, low, high = seeded_mean([statistics.mean(one) for one in some]) if some else (0.0, 0.0, 0.0)
    yield f"{mean:.2f} [{low:.2f}, {high:.2f}]" if some else "-"


def _options() -> argparse.Namespace:
    parser = common_options(__doc__ or "", compared=["extractive", "perplexity", "balanced"])
    parser.add_argument("--questions", type=int, default=60, help="of each set, at most")
    parser.add_argument("--chars", type=int, default=3000, help="of a document, at most")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
