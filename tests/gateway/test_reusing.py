"""What of a chat is looked up and learned, on a real tokenizer and without a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from promptsluice.backend_engine import ChatTokenizer
from promptsluice.gateway.backends.engine_room import Tokens, breaks_in
from promptsluice.gateway.backends.reusing import Reused, asked_last, reused
from promptsluice.kv_reuse import EmptyStore, Finder, ReusePlan
from promptsluice.kv_reuse.blend import SpanHit
from promptsluice.kv_reuse.cuts import BLANK, LINE, NONE, WALL
from promptsluice.policies import ReuseSpec
from promptsluice.prompt import Prompt

LONG = "A sentence about the harbour of the town and its three piers of granite. " * 10


@pytest.mark.parametrize(
    ("messages", "asked"),
    [
        ([("system", LONG), ("user", "How many piers?")], "How many piers?"),
        ([("user", f"{LONG}\n\nQuestion: How many piers?\nBriefly.")], "Question: How many piers?\nBriefly."),
        ([("user", f"<context>{LONG}</context>\nHow many piers?")], "</context>\nHow many piers?"),
        ([("user", f"{LONG}\n\n{LONG}\n\nHow many piers?\n")], "How many piers?"),
        ([("user", LONG * 2)], (LONG * 2).rstrip()[-600:]),
        ([("user", "Look it up."), ("assistant", "I do."), ("tool", LONG)], ""),
        ([("user", "First?"), ("assistant", "Yes."), ("user", "And second?")], "And second?"),
    ],
)
def test_what_is_asked_at_the_end_is_told_from_the_documents(messages: list[tuple[str, str]], asked: str) -> None:
    prompt = Prompt.from_messages([{"role": role, "content": text} for role, text in messages])
    assert asked_last(prompt) == asked


@pytest.mark.slow
def test_a_real_tokenizers_line_ends_and_control_tokens(smollm2_dir: Path) -> None:
    tokenizer = ChatTokenizer(smollm2_dir)
    breaks = breaks_in(tokenizer)
    ids = tokenizer.encode_chat([{"role": "user", "content": "One.\n\nTwo, three\n"}]).ids
    seen = {tokenizer.decode([id_], skip_special_tokens=False): int(breaks[id_]) for id_ in ids}
    assert seen["<|im_start|>"] == seen["<|im_end|>"] == WALL
    assert seen["\n"] == LINE and seen["Two"] == NONE and all(kind != BLANK for kind in seen.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "around",
    ["{}\n\n{}\n\nQuestion: {}", "<doc>{}</doc><doc>{}</doc>{}", "- {}\n- {}\n{}", '["{}", "{}"] {}', "»{}«, »{}«; {}"],
)
def test_text_is_found_whatever_stands_beside_it(smollm2_dir: Path, around: str) -> None:
    """Tokens at a border depend on both sides of it; all others are the document's own."""
    tokenizer = ChatTokenizer(smollm2_dir)
    pier, school = (f"The {name} was built in {year}. {LONG}" for name, year in [("pier", 1843), ("school", 1911)])

    def ids(one: str, two: str, question: str) -> Any:
        content = around.format(one, two, question)
        return tokenizer.encode_chat([{"role": "user", "content": content}]).ids

    finder = Finder(EmptyStore(), fingerprint="model", breaks=breaks_in(tokenizer))
    for chunk in finder.fresh(ids(pier, school, "When?"), salt="a", covered=[], least=48).chunks:
        finder.know(chunk, salt="a")
    turned = ids(school, pier, "Who built it?")
    found = sum(match.length for match in finder.find(turned, salt="a", least=48))
    assert found > 0.9 * (tokenizer.count(pier) + tokenizer.count(school))


@dataclass
class Room:
    """As much of an engine room as finding needs: what is stored is only known, and nothing is loaded."""

    tokenizer: ChatTokenizer
    finder: Finder

    @property
    def reuser(self) -> "Room":
        return self

    def plan(self, ids: Any, spans: Any, **options: Any) -> ReusePlan:
        hits = tuple(SpanHit(match.start, match.length, "ram", 0) for match in options["found"])
        return ReusePlan(None, (*hits, *(SpanHit(*span, "ram", 0) for span in spans)), ())


@pytest.mark.slow
def test_only_what_goes_on_behind_the_prefix_is_looked_for_and_learned(smollm2_dir: Path) -> None:
    tokenizer = ChatTokenizer(smollm2_dir)
    finder = Finder(EmptyStore(), fingerprint="model", breaks=breaks_in(tokenizer))
    room: Any = Room(tokenizer, finder)
    documents = "\n\n".join(f"The {name} was built first. {LONG}" for name in ("pier", "school", "church"))
    prompt = Prompt.from_messages([{"role": "user", "content": f"{documents}\n\nQuestion: When?"}])
    tokens = Tokens(encoded=tokenizer.encode_chat(prompt.messages))
    total = len(tokens.encoded.ids)

    def asked(prefix: int) -> Reused:
        return reused(
            room,
            prompt,
            tokens,
            ReuseSpec(mode="blend"),
            chunks=frozenset(),
            salt=lambda segment: "a",
            own="a",
            prefix=prefix,
            promising=lambda places: True,
        )

    unknown = asked(0)
    assert not unknown.hits and 0.8 * total < sum(map(len, unknown.fresh.chunks)) < total
    half = asked(total // 2)
    assert 0.3 * total < sum(map(len, half.fresh.chunks)) <= total // 2
    assert asked(total).wanted == 0
    for chunk in unknown.fresh.chunks:
        finder.know(chunk, salt="a")
    assert asked(0).hits[0].start < 40 and not asked(0).fresh.chunks
    assert asked(total // 2).hits[0].start >= total // 2 and not asked(total).hits
