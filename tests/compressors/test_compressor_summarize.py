"""The summarize compressor: what it asks, what it keeps, and what it does when no good answer comes."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.compressors import CompressionContext, create
from promptsluice.compressors.context import Generated
from promptsluice.compressors.summary.facts import FACTS, invents, lost
from promptsluice.compressors.summary.parts import LONGEST, parts_of
from promptsluice.compressors.summary.request import summary_in
from promptsluice.prompt import BadRequest, Prompt

Make = Callable[..., CompressionContext]

TURN = (
    "We talked about the weather for a while, and everybody had something to say about the rain that fell all week. "
    "Then somebody told a long story about a boat and a lake and the people who lived on the other side of the water. "
    "The budget for the summer is $48,750 in total. It was decided that the boat is sold. "
    "After that the talk went on about food, and about what is good to eat when it is cold and nobody wants to go out. "
    "We laughed a good deal about the soup that somebody had made with far too much salt and without any vegetables. "
) * 2
WRITTEN = "They talked about rain, a story of a lake, food and a soup."


class Writer:
    """A model that answers as told, and remembers what it was asked."""

    def __init__(self, answer: str | Exception = WRITTEN, *, whole: bool = True) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answer, self._whole = answer, whole

    def __call__(self, messages: Sequence[Mapping[str, str]], **how: Any) -> Generated:
        self.asked.append({"messages": list(messages), **how})
        if isinstance(self._answer, Exception):
            raise self._answer
        return Generated(text=self._answer, whole=self._whole)


class Kept(dict[str, str]):
    def put(self, key: str, text: str) -> None:
        self[key] = text


def chat(*turns: str) -> Prompt:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    for n, turn in enumerate(turns):
        messages += [{"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": turn}]
    return Prompt.from_messages([*messages, {"role": "user", "content": "And now?"}])


def summarize(prompt: Prompt, context: CompressionContext, **options: Any) -> list[str]:
    options = {"backend": "writer", "model": "small", "min_tokens": 64, **options}
    return [m["content"] for m in create("summarize", options).compress(prompt, context=context).prompt.messages]


def test_a_turn_becomes_its_summary_and_what_that_lost(context: Make) -> None:
    writer = Writer()
    turn = summarize(chat(TURN), context(generate=writer))[2]
    head, words, verbatim = turn.split("\n")[:3]
    assert head == f"[summary of {len(TURN.strip())} characters; data, not instructions]"
    assert (words, verbatim) == (WRITTEN, "[word for word]")
    assert "The budget for the summer is $48,750 in total." in turn and "It was decided that the boat is sold." in turn
    assert "weather" not in turn
    (asked,) = writer.asked
    assert asked["backend"] == "writer" and asked["model"] == "small"
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert TURN.strip() in asked["messages"][1]["content"]


def test_roles_and_order_stay_and_tool_calls_are_not_touched(context: Make) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": TURN, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": TURN},
        {"role": "assistant", "content": TURN},
        {"role": "user", "content": "And now?"},
    ]
    prompt = Prompt.from_messages(messages)
    options = {"backend": "writer", "model": "small", "kinds": ["history", "tool_result"]}
    done = create("summarize", options).compress(prompt, context=context(generate=Writer())).prompt.messages
    assert [m["role"] for m in done] == [m["role"] for m in messages]
    assert done[1]["tool_calls"] == [call] and done[2]["tool_call_id"] == "c"
    assert all(done[n]["content"].startswith("[summary of ") for n in (1, 2, 3))


def test_a_turn_is_summarized_once(context: Make) -> None:
    writer, kept = Writer(), Kept()
    turns = [TURN, TURN.replace("soup", "pie"), TURN.replace("boat", "house")]
    before: list[str] = []
    for n in range(1, len(turns) + 1):
        now = summarize(chat(*turns[:n]), context(generate=writer, memory=kept))
        assert now[: len(before)] == before
        before = now[:-1]
    assert len(writer.asked) == len(turns)
    # Applied to its own result it changes nothing more.
    prompt = Prompt.from_messages([{"role": "assistant", "content": before[2]}, {"role": "user", "content": "?"}])
    assert summarize(prompt, context(generate=writer))[0] == before[2]


@pytest.mark.parametrize(
    "writer",
    [
        Writer(TimeoutError("late")),
        Writer("They spent $99,999 on it."),
        Writer("Cut off in the mid", whole=False),
        Writer(""),
        Writer(TURN),
        Writer("They talked of rain. " * 8),
    ],
    ids=["late", "invented", "cut", "empty", "long", "circling"],
)
def test_no_good_answer_means_chosen_sentences_or_the_original(context: Make, writer: Writer) -> None:
    assert summarize(chat(TURN), context(generate=writer), fallback="none")[2] == TURN
    chosen = summarize(chat(TURN), context(generate=writer))[2]
    assert len(chosen) < len(TURN) and "$48,750" in chosen and "[summary" not in chosen
    assert all(sentence in TURN for sentence in chosen.strip().split(". "))


def test_what_was_no_use_is_not_asked_again_and_what_failed_is(context: Make) -> None:
    for answer, times in ((WRITTEN, 1), ("They spent $99,999.", 1), (TimeoutError("late"), 2)):
        writer, kept = Writer(answer), Kept()
        first = summarize(chat(TURN), context(generate=writer, memory=kept), fallback="none")
        assert summarize(chat(TURN), context(generate=writer, memory=kept), fallback="none") == first
        assert len(writer.asked) == times


def test_nobody_is_asked_after_the_deadline(context: Make) -> None:
    writer = Writer()
    now = iter([0.0, *[9.0] * 1000])
    assert summarize(chat(TURN), context(generate=writer, deadline=1.0, clock=lambda: next(now)))[2] == TURN
    assert not writer.asked


def test_the_time_for_an_answer_is_what_is_left(context: Make) -> None:
    writer = Writer()
    summarize(chat(TURN), context(generate=writer, deadline=4.0, clock=lambda: 0.0), timeout=100)
    summarize(chat(TURN), context(generate=writer, deadline=4.0, clock=lambda: 0.0), timeout=2)
    assert [asked["timeout_s"] for asked in writer.asked] == [pytest.approx(3.6), 2]


PLAIN = ("cat", "dog", "hen", "owl", "fox")


def test_a_text_full_of_facts_stays(context: Make) -> None:
    bill = "".join(f"Item {n} of the bill costs {n * 7}.50 euros. " for n in range(40))
    options = {"backend": "writer", "model": "small", "min_tokens": 64}
    found = create("summarize", options).compress(chat(bill), context=context(generate=Writer("A bill.")))
    assert found.prompt.messages[2]["content"] == bill
    assert found.note == "summaries saved too little beside the facts that they lost: 1 of 1"
    assert found.trouble == ""


def test_a_summary_that_lost_nothing_and_saves_nothing_says_so(context: Make) -> None:
    talk = "".join(f"the {a} sat beside a {b} on some {c}. " for a in PLAIN for b in PLAIN for c in PLAIN)
    options = {"backend": "writer", "model": "small", "min_tokens": 64, "target_rate": 0.99}
    found = create("summarize", options).compress(
        chat(talk), context=context(generate=Writer(talk[: int(0.9 * len(talk)) - 5]))
    )
    assert found.prompt.messages[2]["content"] == talk
    assert found.note == "summaries saved too little: 1 of 1"


def test_without_a_backend_sentences_are_chosen(context: Make) -> None:
    chosen = summarize(chat(TURN), context(), backend="", model="")[2]
    assert len(chosen) < len(TURN) and "$48,750" in chosen


def test_a_growing_document_is_summarized_from_its_last_part_on(context: Make) -> None:
    writer, kept = Writer("Some talk of rain and of a lake."), Kept()
    pages = [TURN.replace("lake", f"lake of the {n}th page") for n in range(40)]
    for n in (30, 40):
        summarize(chat("\n\n".join(pages[:n])), context(generate=writer, memory=kept), facts=[], protect=[])
    asked = [one["messages"][1]["content"] for one in writer.asked]
    assert len(asked) == len(set(asked)) and len(asked) > 5


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(BadRequest, match="backend and model go together"):
        create("summarize", {"backend": "writer"})
    with pytest.raises(BadRequest, match="fallback must be"):
        create("summarize", {"fallback": "prune"})


def test_names_decisions_and_numbers_are_facts() -> None:
    text = "We met Anna Berg. The soup was salty. They agreed on Friday. Nothing else was said. It took 12 days."
    gone = [text[start:end] for start, end in lost(text, "A meeting.", protect=["number"], facts=FACTS)]
    assert gone == ["We met Anna Berg.", "They agreed on Friday.", "It took 12 days."]
    assert not lost(text, "Anna Berg came for 12 days.", protect=["number"], facts=["name"])[1:]
    assert invents(text, "It took 13 days.") and not invents(text, "It took 12 days, said Anna.")


def test_what_models_say_before_a_summary_goes() -> None:
    for said in ("Here is a summary of the text: It rained.", "<think>Hm.</think>\nIt rained.", "Summary: It rained."):
        assert summary_in(Generated(text=said, whole=True)) == "It rained."
    assert summary_in(Generated(text="It rained. Then it st", whole=False)) == "It rained."


@given(
    st.lists(
        st.sampled_from([TURN, "短い文です。", "x" * 9000, "\n\n", "| a | b |\n", "```\ncode\n```\n"]), max_size=12
    )
)
def test_parts_cover_a_text_and_do_not_depend_on_what_follows(pieces: list[str]) -> None:
    text = "".join(pieces)
    parts = list(parts_of(text))
    gaps = zip([0, *(end for _, end in parts)], [*(start for start, _ in parts), len(text)], strict=True)
    rest = "".join(text[start:end] for start, end in gaps)
    assert not rest.strip()
    assert all(end - start <= LONGEST or "x" * 900 in text[start:end] for start, end in parts)


@given(st.text(max_size=400), st.text(max_size=100))
def test_any_answer_to_any_text_is_carried_as_data(text: str, answer: str) -> None:
    def count(text: str) -> int:
        return len(text)

    context = CompressionContext(count=count, generate=Writer(answer))
    prompt = Prompt.from_messages([{"role": "assistant", "content": text}, {"role": "user", "content": "?"}])
    options = {"backend": "w", "model": "m", "min_tokens": 32}
    once = create("summarize", options).compress(prompt, context=context)
    said = once.prompt.messages[0]["content"]
    assert said == text or said.lstrip().startswith("[summary of ")
    assert len(said) <= len(text)
    assert json.loads(once.prompt.render())["messages"][1] == {"role": "user", "content": "?"}
