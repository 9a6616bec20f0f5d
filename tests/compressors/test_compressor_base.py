"""The interface: selection, options, fallbacks, deadlines, reports."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from promptsluice.compressors import (
    CompressionContext,
    Compressor,
    Job,
    Rewrite,
    Task,
    TextCompressor,
    create,
    names,
    option_names,
)
from promptsluice.compressors.base import LossyOptions, missed_note
from promptsluice.prompt import BadRequest, Kind, Prompt

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]
TextsOf = Callable[[Prompt], list[str]]


@dataclass(frozen=True, kw_only=True)
class Halver(TextCompressor):
    """Keeps the first half of a text; fails on texts that say so."""

    name = "halver"
    lossless = True

    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        if "fail" in task.text:
            raise ZeroDivisionError("secret text")
        return Rewrite(((0, len(task.text) // 2),))


@dataclass(frozen=True, kw_only=True)
class Longer(TextCompressor):
    name = "longer"
    lossless = True

    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        return Rewrite(((0, len(task.text)), " and more words"))


@dataclass(frozen=True, kw_only=True)
class Careless(LossyOptions, TextCompressor):
    name = "careless"

    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        return Rewrite(((0, 10),))


@dataclass(frozen=True, kw_only=True)
class StopsHalfway(Compressor):
    name = "stops-halfway"
    lossless = True

    def rewrite(self, job: Job) -> Iterator[tuple[Task, Rewrite]]:
        yield job.tasks[0], Rewrite(((0, 5),))
        raise ValueError("no more")


@pytest.mark.parametrize("name", ["identity", "lossless", "extractive", "perplexity"])
def test_untouched_prompt_stays_byte_identical(name: str, context: Make) -> None:
    system = b'{"role":"system","content":"word  \\n\\n\\n\\nword"}'
    raw = b'{"x":1.0, "messages":[%s, {"role":"user","content":"Hi  \\n\\n\\n"}]}' % system
    result = create(name).compress(Prompt.from_body(raw), context=context(question="Hi"))
    assert result.prompt.render() == raw
    assert result.rate == 1.0


def test_only_open_segments_of_chosen_kinds_change(context: Make, prompt_of: PromptOf) -> None:
    prompt = prompt_of("one two three four five six")
    result = Halver(kinds=frozenset({Kind.TOOL_RESULT})).compress(prompt, context=context())
    changed = [segment for segment in result.prompt.segments if segment.changed]
    assert [segment.kind for segment in changed] == [Kind.TOOL_RESULT]
    assert Halver(kinds=frozenset({Kind.SYSTEM})).compress(prompt, context=context()).prompt is prompt


def test_change_reports_spans_and_tokens(context: Make, prompt_of: PromptOf) -> None:
    text = "one two three four five six"
    result = Halver(kinds=frozenset({Kind.TOOL_RESULT})).compress(prompt_of(text), context=context())
    (change,) = result.changes
    assert change.kept == ((0, 13),)
    assert change.tokens_after == 3 < change.tokens_before
    assert "".join(text[start:end] for start, end in change.kept) == result.prompt.text_of(change.path)
    assert result.rate == change.rate < 1


def test_failure_on_one_text_leaves_it_and_says_so(
    context: Make, prompt_of: PromptOf, tool_texts: Callable[[Prompt], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    result = Halver().compress(prompt_of("please fail on this", "one two three four"), context=context())
    assert tool_texts(result.prompt) == ["please fail on this", "one two t"]
    assert "halver failed (ZeroDivisionError)" in result.note
    assert "secret" not in result.note
    assert "halver failed" in caplog.text


def test_what_was_done_before_a_failure_counts(
    context: Make, prompt_of: PromptOf, tool_texts: Callable[[Prompt], list[str]]
) -> None:
    result = StopsHalfway(kinds=frozenset({Kind.TOOL_RESULT})).compress(
        prompt_of("one two three", "four five six"), context=context()
    )
    assert tool_texts(result.prompt) == ["one t", "four five six"]
    assert "ValueError" in result.note


def test_longer_text_is_refused(context: Make, prompt_of: PromptOf) -> None:
    prompt = prompt_of("one two three")
    assert Longer().compress(prompt, context=context()).prompt is prompt


def test_lost_protected_text_is_refused(context: Make, prompt_of: PromptOf) -> None:
    prompt = prompt_of("The invoice says that $48,750 is due. " * 8)
    result = Careless(kinds=frozenset({Kind.TOOL_RESULT})).compress(prompt, context=context())
    assert result.prompt is prompt
    assert "lost protected text" in result.note


@pytest.mark.parametrize("name", ["lossless", "extractive", "perplexity"])
def test_past_deadline_the_original_goes_out(name: str, context: Make, prompt_of: PromptOf) -> None:
    prompt = prompt_of("Some words here.   \n\n\n\nAnd some more.\n" * 40)
    result = create(name).compress(prompt, context=context(deadline=5.0, clock=lambda: 6.0))
    assert result.prompt is prompt
    assert "deadline" in result.note


@pytest.mark.parametrize(("name", "options"), [("extractive", {"relevance": "meaning"}), ("perplexity", {})])
def test_missing_callable_is_said(name: str, options: dict[str, str], context: Make, prompt_of: PromptOf) -> None:
    prompt = prompt_of("Some words that go on. " * 20)
    result = create(name, options).compress(prompt, context=context(embed=None, score=None))
    assert result.prompt is prompt
    assert "needs" in result.note


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "word", "\ud83d", "\x00\ufffe\u202e", "<|im_end|>", "é" * 3, "。", "[", "```"]
)
def test_odd_texts_pass(name: str, text: str, context: Make, prompt_of: PromptOf) -> None:
    options = {} if name in ("identity", "lossless") else {"min_tokens": 1}
    result = create(name, options).compress(prompt_of(text), context=context())
    assert not result.note.count("failed")
    assert result.rate <= 1.0


# A pattern or a loop that takes quadratic time on one of these takes hours.
ONE_LINE = {
    "noise": "x7Qz!",
    "words": "quiet rivers carry heavy boats ",
    "full stops": ".",
    "exclamations": "!?",
    "protected": "user_id_42 ",
    "chinese": "河水静静地流过青山",
    "brackets": "(a ",
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [40_000, 1_000_000])
@pytest.mark.parametrize("name", ["extractive", "perplexity"])
@pytest.mark.parametrize("text", ONE_LINE)
def test_one_long_line_ends(text: str, name: str, size: int, context: Make, prompt_of: PromptOf) -> None:
    line = ONE_LINE[text] * (size // len(ONE_LINE[text]))
    result = create(name, {"target_rate": 0.5}).compress(prompt_of(line), context=context(count=len))
    assert not result.note.count("failed")
    assert result.rate <= 1.0


@pytest.mark.parametrize("name", ["extractive", "perplexity"])
def test_what_fits_already_is_left_alone(name: str, context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    """With a size as the target, doing it twice is doing it once."""
    text = " ".join(f"The {a} {b} stood beside the {b} {a}." for a in ("old", "red", "tall") for b in ("gate", "barn"))
    options = {"target_tokens": 40, "min_tokens": 1, "kinds": ["tool_result"]}
    once = create(name, options).compress(prompt_of(text), context=context())
    assert once.tokens_after <= 40
    twice = create(name, options).compress(once.prompt, context=context())
    assert tool_texts(twice.prompt) == tool_texts(once.prompt)


def test_marked_text_survives(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    free = "The committee talked about the weather and about the food and the day. "
    marked = "<keep>of the and a of the</keep>"
    for name in ("extractive", "perplexity"):
        options = {"target_rate": 0.3, "protect": []}
        result = create(name, options).compress(prompt_of(free * 6 + marked + " " + free * 6), context=context())
        assert marked in tool_texts(result.prompt)[0]
        assert result.rate < 0.6


def test_options_are_checked() -> None:
    with pytest.raises(BadRequest, match="did you mean 'target_rate'") as caught:
        create("extractive", {"target_ratio": 0.5})
    assert caught.value.param == "target_ratio"
    with pytest.raises(BadRequest, match="did you mean 'perplexity'"):
        create("perplexty")
    for name, value in {"target_rate": 0, "protect": ["codes"], "kinds": "history", "min_tokens": True}.items():
        with pytest.raises(BadRequest) as caught:
            create("perplexity", {name: value})
        assert caught.value.param == name
    assert create("extractive", {"kinds": ["document"], "target_rate": 1}).kinds == {Kind.DOCUMENT}
    assert "redundancy" in option_names("extractive")


@pytest.mark.slow
def test_importing_needs_no_torch() -> None:
    code = (
        "import sys, promptsluice.compressors as c\n"
        "for name in c.names(): c.create(name)\n"
        "assert not {'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


def test_rewrites_compose() -> None:
    source = "abcdefghij"
    first = Rewrite(((0, 3), "XYZ", (5, 9)))
    second = Rewrite(((1, 2), "-", (2, 8)))
    assert first.text(source) == "abcXYZfghi"
    assert first.then(second).text(source) == second.text(first.text(source)) == "b-cXYZfg"
    assert first.kept == ((0, 3), (5, 9))


def test_the_note_of_a_missed_rate_rounds_down() -> None:
    assert missed_note(6, wanted=5.6, tokens=11).endswith("5 of 11 tokens were asked for, 6 must stay")
