"""What sentence selection keeps of what answers, and what it costs: by words, by meaning, and by both.

Run: python benchmarks/relevance.py FOLDER [--questions 100] [--rates 0.33,0.5,0.65]

FOLDER holds hotpotqa_100 (of each question the sentences that support its answer are known) and xquad (the sentence
that holds the answer; also asked in Chinese of English text, where no word is shared). Printed for each set, way and
rate: the share of those sentences that stay, the rate reached, and the milliseconds per 1,000 tokens (one thread,
median).
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from ttft_rag import machine

if TYPE_CHECKING:
    from promptsluice.compressors.context import Count, Embed

EMBEDDER, TOKENIZER = "all-minilm-l6-v2", "smollm2-135m-instruct"


@dataclass(frozen=True)
class Case:
    """A question, documents, and the sentences of them that answer it."""

    question: str
    documents: tuple[str, ...]
    answers: tuple[str, ...]


def hotpot(folder: Path, most: int) -> Iterator[Case]:
    lines = (folder / "hotpotqa_100" / "hotpotqa_distractor_100.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines[:most]):
        support = {(title, at) for title, at in row["supporting_facts"]}
        found = [
            sentence.strip()
            for title, sentences in row["context"]
            for at, sentence in enumerate(sentences)
            if (title, at) in support and sentence.strip()
        ]
        documents = tuple(f"# {title}\n\n{''.join(sentences).strip()}" for title, sentences in row["context"])
        yield Case(row["question"], documents, tuple(found))


def xquad(folder: Path, most: int, *, asked_in: str) -> Iterator[Case]:
    from promptsluice.compressors.sentences import units_of

    texts, questions = (
        json.loads((folder / "xquad" / f"xquad.{language}.json").read_text(encoding="utf-8"))["data"]
        for language in ("en", asked_in)
    )
    given = 0
    for text, asked in zip(texts, questions, strict=True):
        documents = tuple(paragraph["context"] for paragraph in text["paragraphs"])
        for paragraph, other in zip(text["paragraphs"], asked["paragraphs"], strict=True):
            at = paragraph["qas"][0]["answers"][0]["answer_start"]
            context = paragraph["context"]
            holds = [context[unit.start : unit.end] for unit in units_of(context) if unit.start <= at < unit.end]
            if holds and given < most:
                given += 1
                yield Case(other["qas"][0]["question"], documents, tuple(holds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--rates", default="0.33,0.5,0.65", type=lambda text: [float(part) for part in text.split(",")])
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from promptsluice.backend_engine import ChatTokenizer
    from promptsluice.backend_engine.hub import ModelHub, default_root
    from promptsluice.rag import SentenceEmbedder

    torch.set_num_threads(1)
    hub = ModelHub(default_root())
    embedder = SentenceEmbedder(str(hub.resolve(EMBEDDER)))
    count = ChatTokenizer(hub.resolve(TOKENIZER)).count
    sets = {
        "hotpotqa": list(hotpot(options.folder, options.questions)),
        "xquad": list(xquad(options.folder, options.questions, asked_in="en")),
        "xquad, asked in Chinese": list(xquad(options.folder, options.questions, asked_in="zh")),
    }
    table = Table(title=machine())
    for column in ("set", "relevance", "asked", "reached", "answers kept", "ms / 1,000 tokens"):
        table.add_column(column, justify="left" if column in ("set", "relevance") else "right")
    for name, cases in sets.items():
        for by in ("words", "meaning", "auto"):
            for rate in options.rates:
                table.add_row(name, by, f"{rate}", *row(cases, by, rate, count=count, embed=embedder.embed))
                print(name, by, rate, file=sys.stderr)
    Console(width=120).print(table)


def row(cases: list[Case], by: str, rate: float, *, count: "Count", embed: "Embed") -> list[str]:
    """The last three columns."""
    from promptsluice.compressors import CompressionContext, create
    from promptsluice.prompt import Prompt

    kept, reached, speeds = [], [], []
    compressor = create("extractive", {"target_rate": rate, "relevance": by, "kinds": ["document"], "protect": []})
    for case in cases:
        prompt = Prompt.from_messages([{"role": "user", "content": case.question}])
        prompt = prompt.insert_before(0, [(text, str(n)) for n, text in enumerate(case.documents)])
        began = time.perf_counter()
        result = compressor.compress(
            prompt, context=CompressionContext(count=count, question=case.question, embed=embed)
        )
        speeds.append(1e6 * (time.perf_counter() - began) / result.tokens_before)
        reached.append(result.rate)
        text = "\n".join(segment.text for segment in result.prompt.segments)
        kept.append(statistics.mean(answer in text for answer in case.answers))
    return [f"{statistics.mean(reached):.2f}", f"{statistics.mean(kept):.3f}", f"{statistics.median(speeds):.0f}"]


if __name__ == "__main__":
    main()
