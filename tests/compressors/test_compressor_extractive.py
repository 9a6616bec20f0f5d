"""Sentence selection: splitting in several languages, relevance, redundancy, rate, structure."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from promptsluice.compressors import Compression, CompressionContext, create
from promptsluice.compressors.sentences import units_of
from promptsluice.prompt import Prompt

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]
TextsOf = Callable[[Prompt], list[str]]


def cut(text: str) -> list[str]:
    return [text[unit.start : unit.end] for unit in units_of(text)]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (
            "Dr. Smith paid $3.50 to J. Doe, e.g. at noon. He left! Did he? Yes.",
            ["Dr. Smith paid $3.50 to J. Doe, e.g. at noon.", "He left!", "Did he?", "Yes."],
        ),
        ("他走了。“你好！”她说。为什么？", ["他走了。", "“你好！”", "她说。", "为什么？"]),
        ("今日は。明日も！", ["今日は。", "明日も！"]),
        ("ذهب إلى البيت. هل عاد؟ نعم.", ["ذهب إلى البيت.", "هل عاد؟", "نعم."]),
        ("wrapped prose that goes\non below. Next one.", ["wrapped prose that goes\non below.", "Next one."]),
        ("Ann: Hello there.\nBob: Good day.", ["Ann:", "Hello there.", "Bob:", "Good day."]),
        ("# Head\nBody. More.\n- item one. Still one.\n  goes on\n- two", ["# Head", "Body.", "More.",
         "- item one. Still one.\n  goes on", "- two"]),
        ("Code:\n\n```\nA. B. C.\n\nD.\n```\nEnd.", ["Code:", "```\nA. B. C.\n\nD.\n```", "End."]),
        ("The no. 5 bus. It said no. Then it went.", ["The no. 5 bus.", "It said no.", "Then it went."]),
    ],
)  # fmt: skip
def test_units(text: str, sentences: list[str]) -> None:
    assert cut(text) == sentences


def test_endless_line_is_cut_at_clauses() -> None:
    text = "some words go on, " * 5000
    pieces = cut(text)
    assert all(len(piece) <= 1000 and piece.endswith(",") for piece in pieces)


def test_relevant_sentences_stay_in_order(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    filler = "Quite another matter entirely, about gardens and weather. "
    text = filler * 5 + "The refund takes one week. " + filler * 5 + "A refund needs the receipt. " + filler * 5
    prompt = prompt_of(text, question="ok")
    messages = [*prompt.messages[:-1]]
    messages[1] = {"role": "user", "content": "How does the refund work, receipt and week?"}
    result = create("extractive", {"target_rate": 0.15}).compress(
        Prompt.from_messages([*messages, {"role": "user", "content": "ok"}]), context=context(question="ok")
    )
    (short,) = tool_texts(result.prompt)
    assert short.index("The refund takes one week.") < short.index("A refund needs the receipt.")
    assert short.count("gardens") <= 1


def test_rate_is_met_on_real_text(context: Make, prompt_of: PromptOf, tool_texts: TextsOf, data: Path) -> None:
    meeting = json.loads((data / "meeting.json").read_text(encoding="utf-8"))
    text = "\n".join(meeting["turns"])
    for target in (0.5, 0.7):
        result = create("extractive", {"target_rate": target}).compress(
            prompt_of(text, question=meeting["question"]), context=context(question=meeting["question"])
        )
        assert target - 0.03 < result.rate <= target
        (short,) = tool_texts(result.prompt)
        assert "Offences Against the Person Act 1861" in short
        change = result.changes[-1]
        assert short == "".join(text[start:end] for start, end in change.kept)


def test_headings_and_code_stay_with_their_text(
    context: Make, prompt_of: PromptOf, tool_texts: TextsOf, data: Path
) -> None:
    text = (data / "async_en.md").read_text(encoding="utf-8")
    result = create("extractive", {"target_rate": 0.3, "protect": ["code"]}).compress(
        prompt_of(text), context=context()
    )
    (short,) = tool_texts(result.prompt)
    lines = short.split("\n")
    for block in text.split("```")[1::2]:
        assert block in short
    heads = [line for line in lines if line.startswith("#")]
    assert heads
    assert result.changes[-1].tokens_after < result.changes[-1].tokens_before


def test_all_protected_says_that_the_rate_was_missed(context: Make, prompt_of: PromptOf) -> None:
    prompt = prompt_of("Order A1B2 costs $5 now. " * 30)
    result = create("extractive").compress(prompt, context=context())
    assert result.prompt is prompt
    tokens = result.tokens_before
    assert result.note == (
        f"the target rate was missed: {tokens / 2:.0f} of {tokens} tokens were asked for, {tokens} must stay"
    )


def test_documents_of_one_message_share_the_budget(context: Make) -> None:
    good = "The refund takes a week to arrive. The refund needs a receipt from you. Every refund goes to the card. " * 2
    bad = "Gardens are green in spring weather. Weather is nice over there today. Trees are tall in the gardens. " * 2
    prompt = Prompt.from_messages([{"role": "user", "content": "refund receipt card week"}])
    prompt = prompt.insert_before(0, [(good, "a"), (bad, "b")])
    result = create("extractive", {"target_rate": 0.5, "redundancy": 0.0, "min_tokens": 1}).compress(
        prompt, context=context(question="refund receipt card week")
    )
    first, second = (segment.text for segment in result.prompt.segments if segment.source)
    assert len(second) < len(first) / 2
    assert second.strip()


def test_redundancy_control_prefers_something_new(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    same = "The refund takes about one week. "
    text = same * 10 + "The refund needs some receipt. "
    results = {
        weight: tool_texts(
            create("extractive", {"target_rate": 0.25, "redundancy": weight, "min_tokens": 1, "kinds": ["tool_result"]})
            .compress(prompt_of(text), context=context())
            .prompt
        )[0]
        for weight in (0.0, 0.5)
    }
    assert "receipt" in results[0.5]


def test_deadline_between_batches_keeps_the_rest(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    now = 0.0

    def slow(texts: Sequence[str]) -> NDArray[np.float32]:
        nonlocal now
        now += 0.01 * len(texts)
        return np.ones((len(texts), 4), dtype=np.float32)

    text = " ".join(f"{word} sentence of some words goes here." for word in ("One", "Two", "Three") * 40)
    result = create("extractive", {"relevance": "meaning"}).compress(
        prompt_of(text), context=context(embed=slow, deadline=0.5, clock=lambda: now)
    )
    assert now <= 0.5
    assert "16 of 120 sentences judged" in result.note
    assert tool_texts(result.prompt)[0].endswith(text[-2000:])


def test_broken_vectors_do_no_harm(context: Make, prompt_of: PromptOf) -> None:
    def broken(texts: Sequence[str]) -> Any:
        return np.full((len(texts), 3), np.nan, dtype=np.float32)

    result = create("extractive", {"relevance": "meaning"}).compress(
        prompt_of("One thing is here. Another is there. " * 20), context=context(embed=broken)
    )
    assert result.note == ""
    assert 0.4 < result.changes[-1].rate <= 0.5


def unused(texts: Sequence[str]) -> NDArray[np.float32]:
    raise AssertionError(f"{len(texts)} texts were embedded")


FILLER = "Quite another matter entirely, about gardens and weather. " * 6
WORDED = f"{FILLER}The refund arrives in one week. {FILLER}"


@pytest.mark.parametrize("by", ["auto", "words"])
def test_words_that_are_shared_need_no_model(by: str, context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    prompt = asked_of(prompt_of, WORDED, "When does my refund arrive?")
    result = create("extractive", {"target_rate": 0.2, "relevance": by}).compress(prompt, context=context(embed=unused))
    assert "refund arrives" in tool_texts(result.prompt)[0]
    assert result.changes[-1].rate <= 0.2


@pytest.mark.parametrize(("by", "embedded"), [("auto", True), ("words", False), ("meaning", True)])
def test_meaning_decides_where_words_say_little(by: str, embedded: bool, context: Make, prompt_of: PromptOf) -> None:
    seen: list[int] = []

    def embed(texts: Sequence[str]) -> NDArray[np.float32]:
        seen.append(len(texts))
        return np.ones((len(texts), 4), dtype=np.float32)

    prompt = asked_of(prompt_of, WORDED, "Wann kommt mein Geld zurück?")
    create("extractive", {"target_rate": 0.2, "relevance": by}).compress(prompt, context=context(embed=embed))
    assert bool(seen) is embedded


def test_without_an_embedder_words_decide(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    prompt = asked_of(prompt_of, WORDED, "Wann kommt mein Geld zurück?")
    result = create("extractive", {"target_rate": 0.2}).compress(prompt, context=context(embed=None))
    assert result.note == ""
    assert 0 < result.changes[-1].rate <= 0.2
    missing = create("extractive", {"relevance": "meaning"}).compress(prompt, context=context(embed=None))
    assert missing.prompt is prompt
    assert "needs an embedder" in missing.note


def test_meaning_that_would_come_too_late_is_replaced_by_words(
    context: Make, prompt_of: PromptOf, tool_texts: TextsOf
) -> None:
    now = 0.0

    def slow(texts: Sequence[str]) -> NDArray[np.float32]:
        nonlocal now
        now += 0.1 * len(texts)
        return np.ones((len(texts), 4), dtype=np.float32)

    text = " ".join(f"{word} sentence of some words goes here." for word in ("One", "Two", "Three") * 40)
    prompt = asked_of(prompt_of, text, "Wann kommt das Geld?")
    result = create("extractive").compress(prompt, context=context(embed=slow, deadline=2.5, clock=lambda: now))
    assert result.note == ""
    assert result.changes[-1].rate <= 0.5


def test_an_embedder_that_cannot_be_had_leaves_words(context: Make, prompt_of: PromptOf) -> None:
    def broken(texts: Sequence[str]) -> NDArray[np.float32]:
        raise OSError("no such model")

    prompt = asked_of(prompt_of, WORDED, "Wann kommt mein Geld zurück?")
    result = create("extractive", {"target_rate": 0.2}).compress(prompt, context=context(embed=broken))
    assert result.note == ""
    assert 0 < result.changes[-1].rate <= 0.2


def test_an_embedder_that_takes_all_the_time_cuts_nothing(context: Make, prompt_of: PromptOf) -> None:
    now = 0.0

    def loads_first(texts: Sequence[str]) -> NDArray[np.float32]:
        nonlocal now
        now += 5.0
        return np.ones((len(texts), 4), dtype=np.float32)

    prompt = asked_of(prompt_of, WORDED, "Wann kommt mein Geld zurück?")
    result = create("extractive").compress(prompt, context=context(embed=loads_first, deadline=1.0, clock=lambda: now))
    assert result.prompt is prompt
    assert "deadline" in result.note


def test_a_heading_speaks_for_what_it_heads(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    text = "".join(f"## {name}\n\nIt was founded in {year}. It has many halls.\n\n" for name, year in FOUNDED)
    prompt = asked_of(prompt_of, text, "When was the Morland works founded?")
    options = {"target_rate": 0.4, "relevance": "words", "protect": [], "redundancy": 0.0}
    result = create("extractive", options).compress(prompt, context=context(embed=unused))
    assert "## Morland\n\nIt was founded in 1871." in tool_texts(result.prompt)[0]


FOUNDED = (("Arden", 1812), ("Belmont", 1834), ("Carrow", 1855), ("Morland", 1871), ("Ostrey", 1893), ("Penrith", 1902))


def asked_of(prompt_of: PromptOf, text: str, question: str) -> Prompt:
    messages = prompt_of(text).messages
    return Prompt.from_messages([{**m, "content": question} if m["role"] == "user" else m for m in messages])


@pytest.mark.slow
def test_real_embedder_finds_the_answer_without_shared_words(
    minilm_dir: Path, context: Make, prompt_of: PromptOf, tool_texts: TextsOf
) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_dir), device="cpu")
    text = (
        "The committee met in the large hall. Coffee was served during the break. Several members arrived late. "
        "Her salary will rise by a tenth from next spring. The chairs were rather uncomfortable. "
        "A photographer took pictures of the building. The minutes were approved without debate. "
    )
    prompt = prompt_of(text)
    messages = [{**m, "content": "How much more will she earn?"} if m["role"] == "user" else m for m in prompt.messages]
    result = create("extractive", {"target_rate": 0.3}).compress(
        Prompt.from_messages(messages),
        context=context(embed=lambda texts: model.encode(list(texts), show_progress_bar=False)),
    )
    assert "salary" in tool_texts(result.prompt)[0]


def test_nobody_is_said_to_have_said_nothing(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    turns = "\n".join(
        f"Budget Officer: the {word} is a matter of some other kind." for word in ["cat", "dog", "owl", "fox"]
    )
    text = f"{turns}\nBob: we shall talk of it later, and not now."
    options = {"target_rate": 0.3, "relevance": "words", "min_tokens": 1}
    question = "What does the budget officer want?"
    result = create("extractive", options).compress(prompt_of(text), context=context(question=question))
    kept = tool_texts(result.prompt)[0].split("\n")
    assert 0 < len(kept) < 5
    assert all(line.split(": ")[1] for line in kept)


@pytest.mark.parametrize("target", [0.3, 0.5])
def test_labels_cost_what_is_chosen_nothing(target: float, context: Make, prompt_of: PromptOf) -> None:
    text = "\n".join(["Budget Officer: ok alpha then."] * 20)
    options = {"target_rate": target, "relevance": "words"}
    result = create("extractive", options).compress(prompt_of(text), context=context())
    assert target - 0.05 <= result.rate <= target


@pytest.mark.parametrize(
    ("question", "answered"), [("Who sold the boat?", True), ("Who is it?", False), ("Elephants?", False)]
)
def test_what_answers_stays_though_protected_text_fills_the_budget(
    question: str, answered: bool, context: Make, prompt_of: PromptOf, tool_texts: TextsOf
) -> None:
    bill = [f"Item {n} of the bill costs {n * 7}.50 euros." for n in range(1, 9)]
    sentences = [*bill[:4], "Who knows the weather.", "Anna sold the boat to a stranger.", "Cats sleep.", *bill[4:]]
    prompt = prompt_of(" ".join(sentences)).messages
    prompt = Prompt.from_messages([{"role": "user", "content": question}, *prompt[2:4]])
    for options in ({"target_rate": 0.3}, {"target_tokens": 40}):
        once = create("extractive", options).compress(prompt, context=context(question=question))
        kept = [*bill[:4], *(["Anna sold the boat to a stranger."] if answered else []), *bill[4:]]
        assert tool_texts(once.prompt) == [" ".join(kept)]
        least = context().count(" ".join(bill))
        more = f", {once.tokens_after - least} more with the sentence nearest to the question" if answered else ""
        assert once.note.endswith(f"{least} must stay{more}")
        twice = create("extractive", options).compress(once.prompt, context=context(question=question))
        assert tool_texts(twice.prompt) == tool_texts(once.prompt)


BILL = [f"Item {n} of the bill costs {n * 7}.50 euros." for n in range(1, 9)]
SOLD = "Anna sold the boat to a stranger."


def asked_of_documents(question: str, *texts: str) -> Prompt:
    prompt = Prompt.from_messages([{"role": "user", "content": question}])
    return prompt.insert_before(0, [(text, str(n)) for n, text in enumerate(texts)])


def documents_of(prompt: Prompt) -> list[str]:
    return [segment.text.strip() for segment in prompt.segments if segment.source]


def test_what_answers_stays_where_what_must_stay_leaves_too_little_room(context: Make) -> None:
    text = " ".join([*BILL, "Cats sleep on the sofa in the afternoon.", SOLD])
    target = context().count(" ".join(BILL)) + 1
    result = create("extractive", {"target_tokens": target, "min_tokens": 1}).compress(
        asked_of_documents("Who sold the boat?", text), context=context(question="Who sold the boat?")
    )
    assert documents_of(result.prompt) == [" ".join([*BILL, SOLD])]
    assert f"{target - 1} must stay, " in result.note


def test_what_answers_stays_though_another_document_has_nothing_protected(context: Make) -> None:
    bill, weather = " ".join([*BILL, "Cats sleep.", SOLD]), "It rains on the hills today. Birds sing all day long."
    result = create("extractive", {"target_rate": 0.3, "min_tokens": 1}).compress(
        asked_of_documents("Who sold the boat?", bill, weather), context=context(question="Who sold the boat?")
    )
    assert documents_of(result.prompt)[0] == " ".join([*BILL, SOLD])


@pytest.mark.parametrize(
    ("free", "options"),
    [
        pytest.param(SOLD, {"target_tokens": 20, "ceiling_tokens": 80}, id="the ceiling"),
        pytest.param(f"Anna sold the boat {'on the very same day ' * 15}.", {"target_rate": 0.3}, id="its length"),
        pytest.param("A boat is nice.", {"target_rate": 0.3}, id="what stays shares the same words"),
    ],
)
def test_nothing_goes_over_the_budget_against(free: str, options: dict[str, Any], context: Make) -> None:
    bill = [*BILL, "They sold the boat for 900 euros."]
    question = "Who sold the boat?" if free.startswith("A boat") else "Where is Anna?"
    result = create("extractive", {**options, "min_tokens": 1}).compress(
        asked_of_documents(question, " ".join([*bill, "Cats sleep.", free])), context=context(question=question)
    )
    assert documents_of(result.prompt) == [" ".join(bill)]


def test_a_heading_with_the_words_of_the_question_is_no_answer(context: Make) -> None:
    bill, question = "\n".join(f"- {item}" for item in BILL), "Who sold the boat?"
    text = f"# Who sold the boat\n\n{bill}\n\nCats sleep.\n\n# Others\n\n{bill}\n\n{SOLD}"
    result = create("extractive", {"target_rate": 0.3, "min_tokens": 1}).compress(
        asked_of_documents(question, text), context=context(question=question)
    )
    assert documents_of(result.prompt) == [text.replace("Cats sleep.\n\n", "")]


def test_what_was_not_compared_with_the_question_in_time_is_said(context: Make) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.01
        return now

    text = " ".join([*BILL * 3, *["Cats sleep."] * 60, SOLD])
    result = create("extractive", {"target_tokens": 20, "min_tokens": 1}).compress(
        asked_of_documents("Who sold the boat?", text),
        context=context(question="Who sold the boat?", clock=clock, deadline=0.4),
    )
    assert documents_of(result.prompt) == [" ".join(BILL * 3)]
    assert result.note.endswith("of 61 sentences compared with the question")


def test_what_stays_with_other_words_of_the_question_is_not_enough(context: Make) -> None:
    bill, question = [*BILL, "Paul and Mary have a bill of 90 euros."], "Who sold Paul and Mary the boat?"
    result = create("extractive", {"target_rate": 0.3, "min_tokens": 1}).compress(
        asked_of_documents(question, " ".join([*bill, "Cats sleep.", SOLD])), context=context(question=question)
    )
    assert documents_of(result.prompt) == [" ".join([*bill, SOLD])]


PLACES = [
    "river",
    "stone",
    "winter",
    "market",
    "letter",
    "garden",
    "window",
    "harbour",
    "candle",
    "forest",
    "kitchen",
    "number",
    "engine",
    "planet",
]
PROSE = [f"{' '.join(PLACES[(n * 5 + k * k) % len(PLACES)] for k in range(9)).capitalize()}." for n in range(28)]


@pytest.mark.parametrize("large", [1, 3, 30])
def test_units_too_large_for_the_room_do_not_end_the_search(large: int, context: Make) -> None:
    near = [f"The silver bridge {'stood there ' * 60}for {PLACES[n % len(PLACES)]}." for n in range(large)]
    text, question = " ".join(["It has 42 arches.", *PROSE[:8], *near, *PROSE[8:]]), "What about the silver bridge?"
    result = create("extractive", {"target_tokens": 110, "min_tokens": 1}).compress(
        asked_of_documents(question, text), context=context(question=question)
    )
    (short,) = documents_of(result.prompt)
    assert "It has 42 arches." in short
    assert 99 <= context().count(short) <= 110
    assert not result.note


def test_time_that_ends_in_a_later_search_leaves_no_more_than_was_asked(context: Make) -> None:
    near = f"The silver bridge {'stood there ' * 60}for long."
    prompt = asked_of_documents("What about the silver bridge?", " ".join(["It has 42 arches.", near, *PROSE]))
    sizes: list[int] = []
    done: list[int] = []
    for limit in itertools.count(1):
        sizes.clear()

        def count(text: str) -> int:
            sizes.append(context().count(text))
            return sizes[-1]

        def clock(limit: int = limit) -> float:
            return 10.0 if len(sizes) >= limit else 0.0

        late = context(count=count, clock=clock, deadline=5.0)
        result = create("extractive", {"target_tokens": 110, "relevance": "words"}).compress(prompt, context=late)
        done += [context().count(text) for text in documents_of(result.prompt)]
        if len(sizes) < limit:
            break
    assert done[-1] >= 99
    assert max(size for size in done if size != done[0]) <= 110, done


@pytest.mark.parametrize(
    ("options", "sentences", "note"),
    [
        ({"floor_tokens": 100}, 2, "at least 100 of 284 tokens were to stay, whole sentences make it 142"),
        ({"floor_rate": 0.45}, 2, "at least 128 of 284 tokens were to stay, whole sentences make it 142"),
        ({"floor_tokens": 200}, 3, "at least 200 of 284 tokens were to stay, whole sentences make it 213"),
        ({"floor_tokens": 71}, 1, ""),
        ({"floor_tokens": 283}, 4, "at least 283 of 284 tokens were to stay, whole sentences make it 284"),
        ({"floor_tokens": 1000}, 4, ""),
        ({"floor_tokens": 100, "ceiling_tokens": 120}, 1, "at least 100 of 284 tokens were to stay, 71 do"),
        (
            {"floor_rate": 0.45, "ceiling_tokens": 90},
            2,
            "at least 128 of 284 tokens were to stay, whole sentences make it",
        ),
    ],
)
def test_at_least_the_floor_stays(options: dict[str, Any], sentences: int, note: str, context: Make) -> None:
    text = " ".join(f"{PLACES[n].capitalize()}{' stood by it' * 23}." for n in range(4))
    options = {"target_rate": 0.1, "min_tokens": 1, **options}
    result = create("extractive", options).compress(
        asked_of_documents("Which river?", text), context=context(question="Which river?")
    )
    (short,) = documents_of(result.prompt)
    assert short.count(".") == sentences
    assert short.startswith("River")
    assert (note in result.note) if note else "at least" not in result.note


LISTED = "\n".join(f"- {PLACES[n % 14]} and {PLACES[n * n % 13]}" for n in range(60))
HEADED = "\n\n".join(f"# {PLACES[n % 14]}\n\n{PROSE[n % 28]} {PROSE[(n + 9) % 28]}" for n in range(15))


def results_by_deadline(text: str, options: dict[str, Any], context: Make) -> list[Compression]:
    """What comes of it when time is up after ever more looks at the clock, last when there is enough."""
    results: list[Compression] = []
    for looks in itertools.count(1, 7):
        seen = itertools.count()

        def clock(seen: Iterator[int] = seen, looks: int = looks) -> float:
            return 10.0 if next(seen) >= looks else 0.0

        late = context(question="Which river?", clock=clock, deadline=5.0)
        prompt = asked_of_documents("Which river?", text)
        results.append(create("extractive", {"min_tokens": 1, **options}).compress(prompt, context=late))
        if next(seen) < looks:
            return results
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("text", [" ".join(PROSE * 2), LISTED, HEADED, "- x\n" * 80, ". " * 80])
@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({}, 0.44, 0.5),
        ({"floor_rate": 0.45}, 0.45, 0.5),
        ({"floor_rate": 0.5}, 0.5, 0.53),
        ({"target_rate": 0.8, "relevance": "words"}, 0.75, 0.8),
    ],
)
def test_time_that_ends_in_the_choice_leaves_about_what_was_asked(
    text: str, options: dict[str, Any], least: float, most: float, context: Make
) -> None:
    results = results_by_deadline(text, options, context)
    assert all(result.rate >= least for result in results), [result.rate for result in results]
    cut = [result for result in results if "cut short" in result.note]
    assert cut
    assert all(result.rate <= most for result in cut), [result.rate for result in cut]
    done = results[-1].prompt
    assert all("deadline" in result.note for result in results if result.prompt.messages != done.messages)


def test_time_that_ends_where_only_large_units_meet_the_floor_leaves_all(context: Make) -> None:
    text = " ".join(f"{PLACES[n].capitalize()}{' stood by it' * 23}." for n in range(4))
    results = results_by_deadline(text, {"target_rate": 0.1, "floor_tokens": 100}, context)
    assert results[-1].tokens_after == 142
    assert all(result.tokens_after >= 142 for result in results)
    assert any("original was kept" in result.note and result.tokens_after == 284 for result in results)


def test_time_that_counting_takes_is_left(context: Make) -> None:
    now, looks, deadline = 0.0, 0, 100.0

    def slow(text: str) -> int:
        nonlocal now
        now += len(text) / 1e5
        return context().count(text)

    def clock() -> float:
        nonlocal now, looks
        looks += 1
        if looks == 1200:  # in the order
            now = deadline - 0.7
        now += 1e-3 if looks > 1200 else 0.0
        return now

    text = " ".join(PROSE * 20)
    late = context(count=slow, clock=clock, deadline=deadline)
    options = {"relevance": "words", "min_tokens": 1}
    result = create("extractive", options).compress(asked_of_documents("Which river?", text), context=late)
    assert "cut short" in result.note
    assert 0.45 <= result.rate <= 0.5
    assert now <= deadline
