"""Questions with passages, from HotpotQA and XQuAD files, as chats whose passages are chunks. Used by blend_quality.py.

Everything random is drawn from one seed, so that each run and each machine has the same prompts.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from promptsluice.backend_engine import ChatTokenizer

HOTPOT, XQUAD = "hotpotqa_100/hotpotqa_distractor_100.jsonl", "xquad/xquad.en.json"
SYSTEM = "Answer the question from the documents, with the exact words and nothing else."
LEAD = 'The answer is "'
"""How the assistant begins: without it, small models begin with "The", whatever the documents say."""
RUNGS = ("filler in a block", "4 documents", "8 documents")
"""Sinks that the gateway has for a model of a long context."""
NEAREST = "the nearest of these"
_ROOM = 1 << 20  # tokens: for all of them
NEARBY = 12  # paragraphs of the same article that stand beside the one with the answer


@dataclass(frozen=True)
class Question:
    """A question, its answer, and passages in the order in which they stand in the prompt."""

    text: str
    answer: str
    passages: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A prompt: `spans` (start, tokens) are its passages, `anchors` what each of these may be computed after."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    answer: tuple[int, ...]
    gold: str
    anchors: dict[str, tuple[tuple[int, ...], ...]]

    @property
    def places(self) -> list[int]:
        """Where the passages' tokens stand in the prompt."""
        return [place for start, length in self.spans for place in range(start, start + length)]

    @property
    def offsets(self) -> list[int]:
        """Where they stand in their passages."""
        return [offset for _, length in self.spans for offset in range(length)]


def questions(folder: Path, name: str, *, count: int, passages: int, seed: int) -> list[Question]:
    """The first `count` of a seeded order. The gold passages are always among the `passages` of a question."""
    rng = random.Random(f"{seed} {name}")
    found = list((_hotpot if name == "hotpotqa" else _xquad)(folder, rng, passages))
    rng.shuffle(found)
    return found[:count]


def case_of(question: Question, tokenizer: "ChatTokenizer", *, cut: int) -> Case:
    """The chat as the gateway renders retrieved documents; each passage has at most `cut` tokens."""
    from promptsluice.backend_engine import ChunkMark
    from promptsluice.gateway.backends.sinks import sinks_of
    from promptsluice.kv_reuse import Anchors
    from promptsluice.kv_reuse.prose import DOCUMENTS
    from promptsluice.rag.render import render_block

    texts = [_cut(passage, question.answer, tokenizer, cut) for passage in question.passages]
    pieces = render_block([_Passage(f"passage-{number}", text) for number, text in enumerate(texts)])
    content, marks = "", []
    for text, source in pieces:
        if source is not None:
            marks.append(ChunkMark(1, None, len(content), len(content) + len(text)))
        content += text
    system = {"role": "system", "content": SYSTEM}
    encoded = tokenizer.encode_chat([system, {"role": "user", "content": content + question.text}], chunks=marks)
    ids = (*encoded.ids, *tokenizer.encode_plain(LEAD))
    header = _before_content([system], tokenizer)
    block = _before_content([system], tokenizer, content=pieces[0][0])
    spans = tuple((start, length) for start, length, _ in encoded.spans)
    sinks = sinks_of(tokenizer, room=_ROOM)
    ladder = Anchors(sinks)
    same_for_all = {
        "bare": (),
        "BOS": ids[:1],
        "template": _before_content([], tokenizer),
        "prefix": header,
        "prefix + block": block,
        "filler": _before_content([], tokenizer, content=DOCUMENTS[0]),
        "prefix + filler": _before_content([system], tokenizer, content=DOCUMENTS[0]),
        "prefix + filler in a block": sinks_of(tokenizer, room=_ROOM, before=[system])[0],
        **dict(zip(RUNGS, sinks, strict=True)),
    }
    return Case(
        ids=ids,
        spans=spans,
        answer=tuple(tokenizer.encode_plain(question.answer)),
        gold=question.answer,
        anchors={
            **{name: (anchor,) * len(spans) for name, anchor in same_for_all.items()},
            NEAREST: tuple(ladder.fitting(start)[0] for start, _ in spans),
        },
    )


@dataclass(frozen=True)
class _Passage:
    chunk_id: str
    text: str
    headings: Sequence[str] = ()


def _before_content(system: list[dict[str, str]], tokenizer: "ChatTokenizer", *, content: str = "") -> tuple[int, ...]:
    """What precedes the user's content, or what is in it behind `content`."""
    from promptsluice.backend_engine import ChunkMark

    mark = ChunkMark(len(system), None, len(content), len(content) + 1)
    encoded = tokenizer.encode_chat([*system, {"role": "user", "content": f"{content}."}], chunks=[mark])
    return encoded.ids[: encoded.spans[0][0]]


def _cut(text: str, answer: str, tokenizer: "ChatTokenizer", most: int) -> str:
    """At most `most` tokens, with the answer among them if it is in the text."""
    ids = tokenizer.encode_plain(text)
    if len(ids) <= most:
        return text
    at = text.find(answer)
    until = len(tokenizer.encode_plain(text[: at + len(answer)])) if at >= 0 else 0
    first = max(0, until - most * 3 // 4)
    return tokenizer.decode(ids[first : first + most])


def _hotpot(folder: Path, rng: random.Random, count: int) -> Iterator[Question]:
    for line in (folder / HOTPOT).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        gold = {title for title, _ in row["supporting_facts"]}
        passages = [(title in gold, f"{title}\n{''.join(sentences)}") for title, sentences in row["context"]]
        rng.shuffle(passages)
        if row["answer"] not in ("yes", "no"):  # these can be guessed
            yield _question(row["question"], row["answer"], passages, rng, count)


def _xquad(folder: Path, rng: random.Random, count: int) -> Iterator[Question]:
    paragraphs = [
        paragraph
        for article in json.loads((folder / XQUAD).read_text(encoding="utf-8"))["data"]
        for paragraph in article["paragraphs"]
    ]
    for place, paragraph in enumerate(paragraphs):
        asked = rng.choice(paragraph["qas"])
        others = paragraphs[max(0, place - NEARBY) : place] + paragraphs[place + 1 : place + 1 + NEARBY]
        rng.shuffle(others)
        passages = [(True, paragraph["context"]), *((False, other["context"]) for other in others)]
        yield _question(asked["question"], asked["answers"][0]["text"], passages, rng, count)


def _question(text: str, answer: str, passages: list[tuple[bool, str]], rng: random.Random, count: int) -> Question:
    """`passages` are (whether gold, text); gold ones come first when there is room for `count` only."""
    kept = sorted(passages, key=lambda passage: not passage[0])[:count]
    rng.shuffle(kept)
    return Question(text=text, answer=answer, passages=tuple(passage for _, passage in kept))
