"""500 chat requests of four classes, mixed by one seed. Used by plan.py.

`chat`: one or two turns, no documents. `rag`: a question behind six passages that no other request has. `tools`: three
turns of a long conversation with tool calls, one after another. `repeats`: a question behind four of twelve documents,
in an order of its own. Documents stand in a user message of their own, each in tags, before the question's. A `size`
below 1 makes what is read shorter, not the classes others: fewer passages, shorter pages, earlier turns.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Messages = list[dict[str, Any]]
Make = Callable[[Path, random.Random, float], Iterator[Messages]]

SHARES = {"chat": 3, "rag": 2, "tools": 3, "repeats": 2}
"""Of ten requests."""
_PASSAGES, _POOL, _DRAWN = 6, 12, 4
_DOCUMENT = (700, 1200)  # characters of a repeated document
_LATEST = 6000  # characters of a conversation where its first request is made
_TURNS = 3
_SYSTEM = "Answer from the documents. Say so if they do not contain the answer."
_ASKED = (
    "What is this for, in one sentence?",
    "Which parameters or options are named?",
    "What should one be careful about?",
    "Which example is given?",
    "How does one begin with it?",
)


@dataclass(frozen=True)
class Asked:
    """One request of the class `kind`."""

    kind: str
    messages: Messages


def mixed(folder: Path, *, count: int, seed: int = 0, size: float = 1.0) -> list[Asked]:
    """The first `count` requests: each ten of them have the classes' shares, in a drawn order.

    A shorter list is the beginning of a longer one. SystemExit where the folder lacks a data set.
    """
    dice = random.Random(seed)
    sources = {kind: _endless(make, folder, random.Random(f"{seed} {kind}"), size) for kind, make in _CLASSES.items()}
    drawn: list[Asked] = []
    try:
        while len(drawn) < count:
            kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
            dice.shuffle(kinds)
            drawn += [Asked(kind, next(sources[kind])) for kind in kinds]
    except FileNotFoundError as error:
        raise SystemExit(f"{error.filename} is missing: the folder must have {', '.join(_FILES)}") from error
    return drawn[:count]


def taken(kinds: Sequence[str], each: int | None) -> list[int]:
    """The requests that are asked, by their classes: the first `each` of every one, or all."""
    seen: Counter[str] = Counter()
    found: list[int] = []
    for number, kind in enumerate(kinds):
        seen[kind] += 1
        if each is None or seen[kind] <= each:
            found.append(number)
    return found


def _endless(make: Make, folder: Path, dice: random.Random, size: float) -> Iterator[Messages]:
    while True:
        yield from make(folder, dice, size)


def _chat(folder: Path, dice: random.Random, size: float) -> Iterator[Messages]:
    """Questions of MT-bench, some of them in their second turn, and of GSM8K."""
    answers = {row["question_id"]: row["choices"][0]["turns"][0] for row in _rows(folder / "mt_bench" / "gpt-4.jsonl")}
    chats: list[Messages] = []
    for row in _rows(folder / "mt_bench" / "question.jsonl"):
        first, answer = _user(row["turns"][0]), answers.get(row["question_id"])
        later = [first, {"role": "assistant", "content": answer}, _user(row["turns"][1])]
        chats.append(later if answer and row["question_id"] % 2 else [first])
    chats += [[_user(row["question"])] for row in _rows(folder / "gsm8k" / "test.jsonl")[: len(chats)]]
    dice.shuffle(chats)
    yield from chats


def _rag(folder: Path, dice: random.Random, size: float) -> Iterator[Messages]:
    """HotpotQA: the passages with the answer among others."""
    rows = _rows(folder / "hotpotqa_100" / "hotpotqa_distractor_100.jsonl")
    dice.shuffle(rows)
    for row in rows:
        gold = {title for title, _ in row["supporting_facts"]}
        ordered = sorted(row["context"], key=lambda passage: passage[0] not in gold)[: max(2, round(size * _PASSAGES))]
        dice.shuffle(ordered)
        yield _about([f"{title}\n{''.join(sentences)}" for title, sentences in ordered], row["question"])


def _tools(folder: Path, dice: random.Random, size: float) -> Iterator[Messages]:
    """Trajectories of tau-bench, from where they are long: what an agent sends before its next turns."""
    found = [one["traj"] for one in json.loads((folder / "tau_bench" / "gpt-4o-airline.json").read_text("utf-8"))]
    dice.shuffle(found)
    for messages in found:
        asked = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 1]
        early = [i for i in asked if len(json.dumps(messages[1:i])) <= size * _LATEST]
        first = max(0, len(early) - 1)
        for i in asked[first : first + _TURNS]:
            yield messages[:i]


def _repeats(folder: Path, dice: random.Random, size: float) -> Iterator[Messages]:
    pages = sorted((folder / "fastapi_docs" / "en").rglob("*.md"))
    if not pages:
        raise FileNotFoundError(2, "no pages", str(folder / "fastapi_docs" / "en"))
    pool = [text for page in pages if (text := _beginning(page.read_text("utf-8"), size))]
    documents = dice.sample(pool, _POOL)
    for _ in range(100):
        yield _about(dice.sample(documents, _DRAWN), dice.choice(_ASKED))


def _beginning(page: str, size: float) -> str:
    """The first paragraphs of a page; empty where they are too few."""
    least, most = (size * chars for chars in _DOCUMENT)
    kept = ""
    for paragraph in page.split("\n\n"):
        if len(kept) + len(paragraph) > most:
            break
        kept += f"{paragraph}\n\n"
    return kept.strip() if len(kept) >= least else ""


def _about(documents: Sequence[str], question: str) -> Messages:
    tagged = "\n".join(f"<document>\n{text}\n</document>" for text in documents)
    return [{"role": "system", "content": _SYSTEM}, _user(tagged), _user(question)]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


_CLASSES: Mapping[str, Make] = {"chat": _chat, "rag": _rag, "tools": _tools, "repeats": _repeats}
_FILES = ("mt_bench", "gsm8k", "hotpotqa_100", "tau_bench", "fastapi_docs")
