"""Texts with what must survive in them, from six public collections. Used by compress.py and its like.

A case is cut to a size in characters around what its question is about. Everything random is drawn from one seed.
"""

import gzip
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from promptsluice.compressors import protected_spans
from promptsluice.compressors.jsonscan import documents
from promptsluice.compressors.structure.folds import unfolded

EXACT = frozenset({"identifier", "number", "date", "url", "email"})
_LONG = 6  # samples in the text that they are cut from
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff]")
_NAME = re.compile(r"(?<![.!?]\s)(?<!^)\b[A-Z][\w'-]+\b|\d[\d.,:%]*\d|\d")


@dataclass(frozen=True)
class Case:
    """`facts`: strings of the text that its question is about; `gold`: the answer where one stands in the text."""

    corpus: str
    text: str
    question: str
    facts: tuple[str, ...] = ()
    gold: str = ""

    @property
    def exact(self) -> list[str]:
        """Identifiers, numbers, dates and addresses, as often as they stand there."""
        return [self.text[start:end] for start, end in protected_spans(self.text, categories=EXACT)]

    @property
    def json(self) -> list[Any]:
        """The JSON documents in the text."""
        return parsed(self.text)


def cases(folder: Path, corpus: str, *, count: int, chars: int, seed: int = 0) -> list[Case]:
    """The first `count` of a seeded order, each with about `chars` characters at most."""
    rng = random.Random(f"{seed} {corpus}")
    found = list(CORPORA[corpus](folder / corpus, chars))
    rng.shuffle(found)
    return [replace(case, corpus=corpus) for case in found[:count]]


def samples(folder: Path, corpora: Sequence[str], *, count: int, chars: int) -> list[Case]:
    """`count` short texts, the collections in turns as far as each has any: pieces of about `chars` characters at most
    of longer cases, cut where a paragraph (in a meeting: a turn) ends. All different; no facts, no gold."""
    pools = [_pieces(folder, corpus, chars) for corpus in corpora]
    turns = (case for together in itertools.zip_longest(*pools) for case in together if case is not None)
    return list(itertools.islice(turns, count))


def _pieces(folder: Path, corpus: str, chars: int) -> Iterator[Case]:
    whole = corpus == "kv_retrieval"  # one JSON document each
    joint = "\n" if corpus == "qmsum" else "\n\n"
    seen: set[str] = set()
    for case in cases(folder, corpus, count=sys.maxsize, chars=chars if whole else _LONG * chars):
        parts = case.text.split(joint)
        while parts:
            text = case.text if whole else filled(parts, 0, chars, joint=joint)
            parts = [] if whole else parts[len(text.split(joint)) :]
            if len(text) > chars // 2 and text not in seen:
                seen.add(text)
                yield replace(case, text=text, facts=(), gold="")


def parsed(text: str) -> list[Any]:
    """The values of all valid JSON documents in a text; numbers as they are written."""
    found: list[Any] = []
    for start, end in documents(text):
        try:
            found.append(json.loads(text[start:end], parse_float=str, parse_int=str))
        except ValueError:
            continue
    return found


def lost(case: Case, text: str) -> list[str]:
    """What of the case's exact things stands in `text` less often than in the case; no part of a longer word counts.
    What a count of folded lines stands for is there.
    """
    written = unfolded(text)

    def number(one: str, inside: str) -> int:
        return len(re.findall(rf"(?<!\w){re.escape(one)}(?!\w)", inside))

    return [one for one in dict.fromkeys(case.exact) if number(one, written) < number(one, case.text)]


def stands(gold: str, text: str) -> bool:
    """Whether an answer stands in a text, as no part of a longer word, where words are written apart."""
    if _UNSPACED.search(gold):
        return gold in text
    return re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text) is not None


def _lines(path: Path) -> Iterator[Any]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def _qmsum(folder: Path, chars: int) -> Iterator[Case]:
    """Meetings, from the first turn that a query is about. Facts: the names and numbers of the summary."""
    for row in _lines(folder / "test.jsonl"):
        turns = [f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"]]
        for query in row["specific_query_list"][:2]:
            text = filled(turns, int(query["relevant_text_span"][0][0]), chars)
            named = dict.fromkeys(match[0] for match in _NAME.finditer(query["answer"]))
            yield Case("", text, query["query"], facts=tuple(name for name in named if name in text))


def _hotpot(folder: Path, chars: int) -> Iterator[Case]:
    for row in _lines(folder / "hotpotqa_distractor_100.jsonl"):
        gold = {title for title, _ in row["supporting_facts"]}
        passages = [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"] if title in gold]
        passages += [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"] if title not in gold]
        chosen = filled(passages, 0, chars, joint="\n\n").split("\n\n")
        random.Random(row["id"]).shuffle(chosen)
        text = "\n\n".join(chosen)
        if row["answer"] in text:
            yield Case("", text, row["question"], facts=tuple(sorted(gold)), gold=row["answer"])


def _kv(folder: Path, chars: int) -> Iterator[Case]:
    with gzip.open(folder / "kv-retrieval-75_keys.jsonl.gz", "rt", encoding="utf-8") as file:
        for line, _ in zip(file, range(100), strict=False):
            row = json.loads(line)
            pairs = row["ordered_kv_records"]
            pairs = [pair for pair in pairs if pair[0] == row["key"]] + [
                pair for pair in pairs if pair[0] != row["key"]
            ]
            chosen = sorted(pairs[: max(2, chars // 82)])
            asked = f'What is the value of the key "{row["key"]}"?'
            yield Case("", json.dumps(dict(chosen), indent=1), asked, facts=(row["key"],), gold=row["value"])


def _bfcl(folder: Path, chars: int) -> Iterator[Case]:
    """Tool schemas of several tasks, as a prompt without a field for tools would have them."""
    rows = list(_lines(folder / "BFCL_v4_multiple.json"))
    for at in range(0, len(rows) - 8, 8):
        tools = [
            f"You may call this function:\n{json.dumps(tool)}" for row in rows[at : at + 8] for tool in row["function"]
        ]
        asked, called = rows[at]["question"][0][0]["content"], rows[at]["function"]
        text = filled(tools, 0, chars, joint="\n\n")
        names = [tool["name"] for tool in called if tool["name"] in text]
        yield Case("", text, asked, facts=tuple(names))


def _tau(folder: Path, chars: int) -> Iterator[Case]:
    """An agent's history as a transcript. Facts: the arguments of the calls that the task asks for."""
    for row in json.loads((folder / "gpt-4o-airline.json").read_text(encoding="utf-8")):
        turns = [f"{turn['role']}: {turn['content']}" for turn in row["traj"][1:] if turn.get("content")]
        text = filled(turns, 0, chars, joint="\n\n")
        values = re.findall(r'": "([\w@.-]{4,})"', json.dumps(row["info"]["task"]["actions"]))
        facts = tuple(dict.fromkeys(value for value in values if value in text))
        yield Case("", text, row["info"]["task"]["instruction"], facts=facts)


def _docs(folder: Path, chars: int) -> Iterator[Case]:
    """Pages of a framework's documentation. Facts: what stands as code within a line."""
    for path in sorted((folder / "en").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if len(text) > chars // 2:
            title = re.sub(r"\s*\{.*", "", text.split("\n", 1)[0].lstrip("# "))
            text = filled(text.split("\n\n"), 0, chars, joint="\n\n")
            facts = dict.fromkeys(re.findall(r"`[^`\n]+`", text))
            yield Case("", text, f"What do I need to know about {title}?", facts=tuple(facts)[:20])


def filled(parts: Sequence[str], first: int, chars: int, *, joint: str = "\n") -> str:
    """Whole parts from number `first` on, then those before it, as many as there is room for; at least one."""
    chosen: list[int] = []
    size = 0
    for n in (*range(first, len(parts)), *range(first - 1, -1, -1)):
        size += len(parts[n]) + len(joint)
        if chosen and size > chars:
            break
        chosen.append(n)
    return joint.join(parts[n] for n in sorted(chosen))


CORPORA: dict[str, Callable[[Path, int], Iterator[Case]]] = {
    "qmsum": _qmsum,
    "hotpotqa_100": _hotpot,
    "kv_retrieval": _kv,
    "bfcl": _bfcl,
    "tau_bench": _tau,
    "fastapi_docs": _docs,
}
