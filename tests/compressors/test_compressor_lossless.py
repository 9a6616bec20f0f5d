"""The lossless compressor: white space, JSON layout, repeats, and what it must leave alone."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.compressors import CompressionContext, create
from promptsluice.compressors.repeats import rewrites
from promptsluice.compressors.whitespace import without_blank_space, without_json_layout
from promptsluice.prompt import Prompt

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]
TextsOf = Callable[[Prompt], list[str]]


def tidy(text: str) -> str:
    return without_blank_space(text).text(text)


def dense(text: str) -> str:
    return without_json_layout(text).text(text)


def test_space_at_line_ends_and_blank_lines_go() -> None:
    assert tidy("one \n\n\n\n two\t\n \t\nthree") == "one\n\n two\n\nthree"
    assert tidy("one\r\n\r\n \r\n\r\ntwo \r\n") == "one\r\n\r\ntwo\r\n"
    assert tidy("\n\n\nfirst") == "\nfirst"


@pytest.mark.parametrize(
    "text",
    [
        "a line break  \nin Markdown",
        "```\ncode   \n\n\n\ncode\n```",
        "Text:\n\n    code   \n\n\n\n    code\n",
        "| a  | b |   \n|----|---|\n| 1  | 2 |",
        "- item\n  - nested item\n\n  goes on",
        "@@ -1,3 +1,3 @@\n-old  \n+new  \n \n \n context",
        "a.py-11-    x = 1   \n\n\na.py-12-    y = 2   \n",
        "   indented   in   the   middle",
        "x = 1   \n\n\n\ny = 2   \n",
        "no end  ",
    ],
)
def test_space_that_means_something_stays(text: str) -> None:
    assert tidy(text) == text


def test_too_many_spaces_of_a_line_break_become_two() -> None:
    assert tidy("one     \ntwo") == "one  \ntwo"


def test_json_keeps_all_but_layout() -> None:
    text = (
        '{\n  "big": 123456789012345678901234567890,\n  "f": [1.0, 1e5, -0.0],\n'
        '  "a": 1, "a": 2,\n  "s": " \\u00e9 : , \\" "\n}'
    )
    assert dense(text) == (
        '{"big":123456789012345678901234567890,"f":[1.0,1e5,-0.0],"a":1,"a":2,"s":" \\u00e9 : , \\" "}'
    )


def test_json_between_prose_and_line_by_line() -> None:
    one = '{"name": "a value that is long enough", "n": 1}'
    short = '{"name":"a value that is long enough","n":1}'
    assert dense(f"Result:\n{one}\n{one}\nDone.") == f"Result:\n{short}\n{short}\nDone."


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": [1, 2, 3], "c": "cut off in the mid',
        "{'python': 'dictionary', 'not': 'JSON', 'but': 'close to it'}",
        '{"trailing": "comma", "is": "not JSON at all, sorry",}',
        '```json\n{"inside": "a fence", "must": "not be touched"}\n```',
        'He said {"a": "json in the middle of a line", "b": 2} and left.',
        '{"leading": 007, "zeros": "are no JSON, nor is NaN", "x": NaN}',
        '    {"indented": "four columns is code in Markdown", "b": 2}',
    ],
)
def test_what_is_no_json_document_stays(text: str) -> None:
    assert dense(text) == text


@pytest.mark.slow
def test_nesting_without_limit() -> None:
    text = "[ " * 100_000 + "] " * 100_000
    assert dense(text) == "[" * 100_000 + "]" * 100_000 + " "


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), json_values, min_size=3), st.booleans(), st.sampled_from([0, 2, "\t", None]))
def test_json_round_trip(value: dict[str, Any], ascii_: bool, indent: int | str | None) -> None:
    def exact(text: str) -> Any:
        return json.loads(text, parse_float=str, parse_int=str, object_pairs_hook=lambda pairs: pairs)

    text = json.dumps(value, ensure_ascii=ascii_, indent=indent)
    once = dense(text)
    assert exact(once) == exact(text)
    assert dense(once) == once
    if len(text) >= 40:
        assert once == json.dumps(value, ensure_ascii=ascii_, separators=(",", ":"))


@given(st.text(st.sampled_from('ab \t\n\r`>|-#{}"1.é中')))
def test_space_is_idempotent_and_only_leaves_out_space(text: str) -> None:
    once = tidy(text)
    assert tidy(once) == once
    assert "".join(once.split()) == "".join(text.split())
    assert len(once.split()) == len(text.split())


def paragraph(n: int) -> str:
    return (
        f"Paragraph number {n} begins here and has a good number of words. "
        + f"Its {n} th topic goes on. " * 16
        + f"Its {n} th end."
    )


def test_repeats_become_references(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    first = "\n\n".join(paragraph(n) for n in range(3))
    once = create("lossless").compress(prompt_of(first, f"Intro.\n\n{first}\n\nOutro."), context=context())
    kept, replaced = tool_texts(once.prompt)
    assert kept == first
    assert replaced == (
        f"Intro.\n\n[repeat: the same {len(first)} characters as earlier,"
        " from “Paragraph number 0 begins here and has a good number of word”"
        " to “n. Its 2 th topic goes on. Its 2 th end.”]\n\nOutro."
    )
    again = create("lossless").compress(once.prompt, context=context())
    assert tool_texts(again.prompt) == [kept, replaced]


def test_a_block_that_could_be_mistaken_is_not_replaced(
    context: Make, prompt_of: PromptOf, tool_texts: TextsOf
) -> None:
    same_start = "The very same words stand at the beginning of both of these blocks here. "
    one, two = same_start * 8 + "One.", same_start * 8 + "Two."
    result = create("lossless").compress(prompt_of(one, two, one), context=context())
    assert tool_texts(result.prompt) == [one, two, one]


@pytest.mark.slow
@pytest.mark.parametrize("paragraphs", ["a\n\n" * 150_000, ("word " * 40 + "\n\n") * 20_000])
def test_work_grows_with_the_text_and_not_with_its_square(paragraphs: str) -> None:
    """Tens of thousands of equal paragraphs that stay: each pair compared, this would take minutes."""
    texts = [(0, paragraphs, False), (1, paragraph(1), True), (2, paragraph(1), True)]
    assert set(rewrites(texts, least=400)) == {2}
    # Two that begin alike, so that no copy of either may be replaced.
    ambiguous = f"{'word ' * 41}\n\n{'word ' * 40}\n\n" + ("word " * 40 + "\n\n") * 20_000
    assert not rewrites([(0, ambiguous, True)], least=400)


def test_later_turns_do_not_change_earlier_ones(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    texts = [paragraph(1), paragraph(2), paragraph(1), paragraph(2) + "\n\n" + paragraph(1), paragraph(2)]
    results = [
        tool_texts(create("lossless").compress(prompt_of(*texts[:n]), context=context()).prompt)
        for n in range(1, len(texts) + 1)
    ]
    for shorter, longer in itertools.pairwise(results):
        assert longer[: len(shorter)] == shorter
    assert results[-1][2].startswith("[repeat: the same")


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=5))
def test_repeats_are_idempotent_and_restorable(pages: list[list[int]]) -> None:
    texts = ["\n\n".join(paragraph(n) for n in page) for page in pages]
    done = rewrites(((i, text, True) for i, text in enumerate(texts)), least=400)
    once = [done[i].text(text) if i in done else text for i, text in enumerate(texts)]
    assert not rewrites(((i, text, True) for i, text in enumerate(once)), least=400)
    shown = "\n\n".join(once)
    for n in {n for page in pages for n in page}:
        assert shown.count(paragraph(n)) >= 1
