"""Tables, folds, templates and the padding of Markdown tables: nothing is lost, and everything is done once."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.compressors import CompressionContext, create, protected_spans
from promptsluice.compressors.structure.folds import folded, unfolded
from promptsluice.compressors.structure.lines import shortened_lines
from promptsluice.compressors.structure.markdown import without_table_padding
from promptsluice.compressors.structure.table_reader import restored
from promptsluice.compressors.structure.templates import expanded, templated
from promptsluice.compressors.whitespace import without_json_layout
from promptsluice.prompt import BadRequest, Kind, Prompt

Make = Callable[..., CompressionContext]
PromptOf = Callable[..., Prompt]
TextsOf = Callable[[Prompt], list[str]]


def tabled(text: str) -> str:
    return without_json_layout(text, tables=True).text(text)


def dense(text: str) -> str:
    return without_json_layout(text).text(text)


def test_an_array_of_like_objects_becomes_a_table() -> None:
    rows = [
        {"id": 1, "name": "Bob", "seat": {"row": 3, "side": "left"}, "at": "2024-05-01T12:00"},
        {"id": 2, "name": "Al, Jr.", "at": None},
        {"id": 3, "name": "true", "seat": {"row": 4, "side": ""}, "at": "12"},
    ]
    text = json.dumps({"total": 3, "rows": rows, "next": None}, indent=2)
    assert tabled(text) == (
        '{"total":3,"rows":[table id,name,seat{row,side},at\n'
        "1,Bob,3,left,2024-05-01T12:00\n"
        '2,"Al, Jr.",,,null\n'
        '3,"true",4,"","12"\n'
        '],"next":null}'
    )
    assert restored(tabled(text)) == dense(text)


def test_objects_by_key_and_objects_by_line() -> None:
    text = json.dumps({f"flight {n}": {"from": "JFK", "to": "SEA", "price": n} for n in (1, 2)})
    assert tabled(text) == '{table from,to,price\n"flight 1":JFK,SEA,1\n"flight 2":JFK,SEA,2\n}'
    lines = 'Found:\n{"name": "a", "size": 1}\n{"name": "b", "size": 20}\n{"name": "c"}\nDone.'
    assert tabled(lines) == "Found:\n(table name,size\na,1\nb,20\nc,\n)\nDone."
    assert restored(tabled(lines)) == lines.replace(": ", ":").replace(", ", ",")


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1, "same key": 2, "a": 3}, {"a": 1.0, "same key": 2e5, "a": -0.0}, {"a": 4, "same key": 5, "a": 6}]',
        '[{"name": "\\u00e9\\n\\"", "b\\u0000": "x"}, {"name": "é", "b\\u0000": "y"}, {"name": 1, "b\\u0000": 2}]',
        '[{"deep": {"a": {"b": 1}}}, {"deep": {"a": {"b": 2}}}, {"deep": {"a": {"b": 3}}}, {"deep": {"a": {"b": 4}}}]',
        '[{"deep": {"a": 1}, "x": 1}, {"deep": {}, "x": 2}, {"deep": [], "x": 3}, {"deep": {"a": 2}, "x": 4}]',
        '[{"first": 1, "second": 2}, {"second": 1, "first": 2}, {"second": 3, "first": 4}, {"first": 5, "second": 6}]',
    ],
)
def test_what_is_odd_in_json_survives(text: str) -> None:
    assert restored(tabled(text)) == dense(text)


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1, "b": 2, "c": 3}, [1, 2, 3], {"a": 1, "b": 2, "c": 3}]',
        "[{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}]",
        '[{"one": 1}, {"two": 2}, {"three": 3}, {"four": 4}, {"five": 5}, {"six": 6}]',
        '{"note": "[table a,b", "rows": [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 2}]}',
        "[" * 100 + '{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 2}' + "]" * 100,
    ],
)
def test_no_table_where_rows_are_not_alike_or_could_be_mistaken(text: str) -> None:
    assert tabled(text) == dense(text)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text() | st.sampled_from(["true", "12", "-", "a b", "a,b", " a", "a ", "x: y", "[1]", "2024-05-01", "é", ""])
keys = st.sampled_from(["id", "name", "x y", "é", "", "a.b"])
values = st.recursive(
    scalars | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
)
rows = st.lists(st.dictionaries(keys, values, max_size=4), max_size=6)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(rows | st.dictionaries(texts, rows | st.dictionaries(keys, values)), st.booleans(), st.sampled_from([None, 1]))
def test_tables_round_trip(value: Any, ascii_: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_, indent=indent)
    once = tabled(text)
    assert restored(once) == dense(text)
    assert tabled(once) == once
    assert len(once) <= len(dense(text))


@given(st.text(st.sampled_from('[{(table ab,:"\n}])1'), max_size=80))
def test_reading_what_is_no_table_fails_for_no_text(text: str) -> None:
    assert isinstance(restored(f"[table {text}"), str)


def test_repeated_lines_and_frames_are_folded() -> None:
    frame = '  File "/app/walk.py", line 12, in walk\n    return walk(node.left, depth + 1)\n'
    text = f"Traceback (most recent call last):\n{frame * 90}RecursionError: too deep\n" + "retrying the host\n" * 6
    once = folded(text).text(text)
    assert once == (
        f"Traceback (most recent call last):\n{frame}[the 2 lines above 89 more times]\n"
        "RecursionError: too deep\nretrying the host\n[the line above 5 more times]\n"
    )
    assert unfolded(once) == text
    assert folded(once).text(once) == once


def test_lines_with_the_same_words_become_rows() -> None:
    lines = [f"12:00:{n:02d} GET /items/{n * 7} 200 took {n * 3 % 11} ms req-{n:x}f" for n in range(6)]
    text = "\n".join(["start", *lines, "end"])
    once = templated(text).text(text)
    assert once == (
        "start\n[6 lines: 12:00:{} GET /items/{} 200 took {} ms req-{}]\n"
        "00,0,0,0f\n01,7,3,1f\n02,14,6,2f\n03,21,9,3f\n04,28,1,4f\n05,35,4,5f\nend"
    )
    assert expanded(once) == text


def test_lines_of_a_diff_stay() -> None:
    text = "--- a/a.py\n+++ b/a.py\n@@ -1,40 +1,80 @@\n" + "-    the_same(line)\n+    the_same(line) or {}\n" * 40
    assert shortened_lines(text, folds=True, templates=True).text(text) == text


log_lines = st.lists(
    st.sampled_from(["the very same line of a log", "worker 1 of 3 is up and runs", "worker 2 of 3 is up and runs", ""])
    | st.builds("request {} was answered after {} ms".format, st.integers(0, 20), st.integers(0, 3))
    | st.sampled_from(["[the line above 3 more times]", "[2 lines: a {}]", "[table a,b", "]", "1,2", "{}"]),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(log_lines, st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_logs_round_trip(lines: list[str], templates: bool, end: str) -> None:
    text = end.join(lines)
    once = shortened_lines(text, folds=True, templates=templates).text(text)
    assert once == text or expanded(unfolded(once)) == text
    assert shortened_lines(once, folds=True, templates=templates).text(once) == once
    assert len(once) <= len(text)


def test_padding_of_markdown_tables_goes() -> None:
    text = "| name   | size |\n|:-------|-----:|\n| a \\|   b | `x`  |\n|        | 3    |"
    text += "\n\n| no   | rule |\n| 1    | 2    |"
    once = without_table_padding(text).text(text)
    assert once == "| name | size |\n|:---|---:|\n| a \\|   b | `x` |\n| | 3 |\n\n| no   | rule |\n| 1    | 2    |"
    assert without_table_padding(once).text(once) == once
    fenced = f"```\n{text}\n```"
    assert without_table_padding(fenced).text(fenced) == fenced


@given(st.text(st.sampled_from("|-: a\\\n`\t"), max_size=60))
def test_padding_is_left_out_once_and_is_only_space_and_dashes(text: str) -> None:
    once = without_table_padding(text).text(text)
    assert without_table_padding(once).text(once) == once
    assert once.translate(str.maketrans("", "", " \t-")) == text.translate(str.maketrans("", "", " \t-"))


def test_data_is_rewritten_only_where_it_is_data(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    data = json.dumps([{"identifier": n, "description": "one of many"} for n in range(30)])
    said = "Please look at what I have here, it is long.\n" * 20
    prompt = prompt_of(data)
    result = create("lossless", {"tables": True}).compress(prompt, context=context())
    assert tool_texts(result.prompt)[0].startswith("[table identifier,description\n0,one of many\n")
    assert result.tokens_after < result.tokens_before
    assert tool_texts(create("lossless").compress(prompt, context=context()).prompt) == [dense(data)]
    history = Prompt.from_messages(
        [{"role": "assistant", "content": said}, {"role": "tool", "content": said}, {"role": "user", "content": "?"}]
    )
    assert {segment.kind for segment in history.segments} >= {Kind.HISTORY, Kind.TOOL_RESULT}
    spoken, told = [m["content"] for m in create("lossless").compress(history, context=context()).prompt.messages][:2]
    assert spoken == said
    assert told == said.splitlines()[0] + "\n[the line above 19 more times]\n"


def test_later_turns_do_not_change_earlier_ones(context: Make, prompt_of: PromptOf, tool_texts: TextsOf) -> None:
    log = "".join(f"12:00:{n:02d} the worker is still waiting for a place\n" for n in range(30))
    data = json.dumps([{"identifier": n, "description": "one of many"} for n in range(30)])
    texts = [data, log, "the same line of a long log\n" * 9, data, "a\n" * 50]
    compressor = create("lossless", {"tables": True, "templates": True})
    before: list[str] = []
    for n in range(1, len(texts) + 1):
        now = tool_texts(compressor.compress(prompt_of(*texts[:n]), context=context()).prompt)
        assert now[: len(before)] == before
        assert tool_texts(compressor.compress(prompt_of(*now), context=context()).prompt) == now
        before = now
    assert [text[:7] for text in before[:2]] == ["[table ", "[30 lin"] and before[3].startswith("[repeat: ")


def test_tables_need_json_to_be_on() -> None:
    with pytest.raises(BadRequest, match="only where json is on"):
        create("lossless", {"tables": True, "json": False})


def test_lossy_steps_keep_marks_with_what_they_speak_of() -> None:
    table = "[table name,size\nfirst,one\nsecond,two\n]"
    fold = "some words of prose\n[the line above 12 more times]"
    rows = "[3 lines: it took {} tries]\n7a\n8b\n9c"
    text = f"Some words before it.\n{table}\nAnd words.\n{fold}\nMore words.\n{rows}\nThe end of it."
    spans = [text[start:end] for start, end in protected_spans(text, categories=[])]
    assert spans == [table, fold, rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "a\n" * 500_000,
        "\n".join(f"{n} of them" for n in range(80_000)),
        "[table " * 140_000,
        "[the line above 3 more times]\n" * 30_000,
        "[999999 lines: {}]\n" * 50_000,
        '{"a":' * 200_000,
        "[" + '{"a":[{"b":1},{"b":2}]},' * 40_000 + "0]",
        "| a   " * 160_000,
    ],
    ids=["lines", "rows", "heads", "folds", "templates", "depth", "nested", "cells"],
)
def test_a_megabyte_is_no_trouble(text: str) -> None:
    """Anything that grew with the square of the text would take minutes."""
    assert len(tabled(text)) <= len(text)
    assert len(shortened_lines(text, folds=True, templates=True).text(text)) <= len(text)
    assert len(without_table_padding(text).text(text)) <= len(text)
