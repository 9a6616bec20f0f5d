"""Prompt: lossless round trips, protected pieces, and edits that touch nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.prompt import BadRequest, Kind, Prompt, Protection

TOOL_TURN: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief.", "name": "ops"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "http://x"}}],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.0}'}}],
        "reasoning": {"opaque": "x", "n": 1e5},
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Result:\n```py\nx = 1\n```\ndone"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "What is x?"},
]


def body(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_untouched_is_byte_identical() -> None:
    raw = (
        b'{ "messages":[ {"content":"caf\\u00e9 \\ud83d\\ude00", "role" : "user","x":1.50e+3} ],'
        b'\n "model" : "m", "seed": 12345678901234567890 , "seed":1}'
    )
    prompt = Prompt.from_body(raw)
    assert not prompt.changed
    assert prompt.render() == raw


def test_edit_keeps_everything_else_to_the_byte() -> None:
    raw = (
        b'{"a": 1.0, "messages": [{"role":"user","content":"old\\n","z":1e5}, {"content" :"second",'
        b' "role": "assistant"},'
        b' {"role":"user","content":"q"}], "big": 123456789012345678901234567890, "dup": 1, "dup": 2}'
    )
    prompt = Prompt.from_body(raw)
    changed = prompt.replace({0: 'nëw "text"'})
    assert changed.render() == raw.replace(b'"old\\n"', '"nëw \\"text\\""'.encode())
    assert prompt.render() == raw


def test_kinds_units_and_protection() -> None:
    prompt = Prompt.from_body(body(TOOL_TURN, tools=[{"type": "function", "function": {"name": "f"}}]))
    kinds = [(segment.kind, segment.rewritable) for segment in prompt.segments]
    assert kinds == [
        (Kind.TOOL_SCHEMA, False),
        (Kind.SYSTEM, False),
        (Kind.HISTORY, True),
        (Kind.IMAGE, False),
        (Kind.TOOL_CALL, False),
        (Kind.TOOL_RESULT, True),
        (Kind.CODE, False),
        (Kind.TOOL_RESULT, True),
        (Kind.HISTORY, True),
        (Kind.QUESTION, False),
    ]
    call, result = prompt.segments[4], prompt.segments[5]
    assert call.unit == result.unit
    assert prompt.question == "What is x?"
    assert prompt.text_of(("messages", 3, "content")) == TOOL_TURN[3]["content"]


def test_system_opens_only_on_request() -> None:
    prompt = Prompt.from_body(body(TOOL_TURN)).with_protection(Protection(system=False))
    assert [s.rewritable for s in prompt.segments if s.kind is Kind.SYSTEM] == [True]


@pytest.mark.parametrize(
    ("text", "documents", "question"),
    [
        ("<context>\nDoc A\n</context>\nWho?", ["\nDoc A\n"], "Who?"),
        ("Use this.\n\nFacts and facts.\n\nQuestion: Who?", ["Use this.\n\nFacts and facts.\n\n"], "Question: Who?"),
        ("文档内容。\n问题：谁？", ["文档内容。\n"], "问题：谁？"),
        ("<doc>left open. Who?", [], "<doc>left open. Who?"),
        ("Just a question", [], "Just a question"),
    ],
)
def test_documents_in_the_last_user_message(text: str, documents: list[str], question: str) -> None:
    closed = Prompt.from_messages([{"role": "user", "content": text}])
    opened = closed.with_protection(Protection(last_user=False))
    assert not any(segment.rewritable for segment in closed.segments)
    assert [s.text for s in opened.segments if s.rewritable] == documents
    assert question in opened.question or opened.question in question
    assert "".join(s.text for s in opened.segments) == text


def test_earlier_parts_of_the_last_user_message_are_documents() -> None:
    parts = [{"type": "text", "text": "Document one."}, {"type": "text", "text": "Who?"}]
    prompt = Prompt.from_messages([{"role": "user", "content": parts}]).with_protection(Protection(last_user=False))
    assert [(s.kind, s.rewritable) for s in prompt.segments] == [(Kind.DOCUMENT, True), (Kind.QUESTION, False)]


def test_question_falls_back_to_the_whole_message() -> None:
    assert Prompt.from_messages([{"role": "user", "content": "<context>all in here</context>"}]).question
    assert Prompt.from_messages([{"role": "system", "content": "s"}]).question == ""


def test_insert_before_goes_into_the_leaf() -> None:
    prompt = Prompt.from_body(body(TOOL_TURN))
    question = prompt.segments[-1]
    fuller = prompt.insert_before(question.id, [("<documents>", None), ("chunk", "doc#1"), ("</documents>\n", None)])
    assert fuller.messages[-1]["content"] == "<documents>chunk</documents>\nWhat is x?"
    inserted = [segment for segment in fuller.segments if segment.original is None]
    assert [(s.kind, s.rewritable, s.source) for s in inserted] == [
        (Kind.OTHER, False, None),
        (Kind.DOCUMENT, True, "doc#1"),
        (Kind.OTHER, False, None),
    ]
    again = fuller.replace({inserted[1].id: "less"})
    assert json.loads(again.render())["messages"][-1]["content"] == "<documents>less</documents>\nWhat is x?"
    assert json.loads(again.render())["messages"][:-1] == TOOL_TURN[:-1]


def test_drop_units_takes_calls_and_results_together() -> None:
    prompt = Prompt.from_body(body(TOOL_TURN))
    dropped = prompt.drop_units([prompt.segments[3].unit])
    assert json.loads(dropped.render())["messages"] == [TOOL_TURN[0], TOOL_TURN[1], TOOL_TURN[4], TOOL_TURN[5]]
    assert dropped.messages == [TOOL_TURN[0], TOOL_TURN[1], TOOL_TURN[4], TOOL_TURN[5]]
    assert dropped.rendered_index(5) == 3


def test_drop_a_turn_that_has_no_segment_at_all() -> None:
    odd = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": None}}]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
        {"role": "user", "content": "y"},
    ]
    prompt = Prompt.from_body(body(odd))
    assert prompt.drop_units([1]).messages == [odd[0], odd[3]]


def test_with_fields_replaces_or_appends() -> None:
    raw = b'{"model":"m:balanced","messages":[{"role":"user","content":"q"}]}'
    prompt = Prompt.from_body(raw).with_fields(model="m", stream=True)
    assert prompt.render() == b'{"model":"m","messages":[{"role":"user","content":"q"}], "stream": true}'
    assert prompt.with_fields(model="m:balanced").render().startswith(b'{"model":"m:balanced"')


def test_messages_in_memory_keep_identity() -> None:
    first, last = {"role": "assistant", "content": "long answer"}, {"role": "user", "content": "q"}
    prompt = Prompt.from_messages([first, last], model="m")
    assert prompt.messages[0] is first
    changed = prompt.replace({0: "short"}).messages
    assert changed[0] == {"role": "assistant", "content": "short"}
    assert changed[1] is last
    assert first["content"] == "long answer"


@pytest.mark.parametrize(
    ("raw", "param", "hint"),
    [
        (b"{", None, "line 1"),
        (b"[1]", None, "object"),
        (b'\xff{"a":1}', None, "UTF-8"),
        (b'{"model":"m"}', "messages", "required"),
        (b'{"messages":[]}', "messages", "empty"),
        (b'{"messages":{}}', "messages", "array"),
        (b'{"messages":["x"]}', "messages[0]", "object"),
        (b'{"messages":[{"content":"x"}]}', "messages[0].role", "string"),
        (b'{"messages":[{"role":"user","content":7}]}', "messages[0].content", "string"),
        (b'{"messages":[{"role":"user","content":[7]}]}', "messages[0].content[0]", "object"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', None, "surrogate"),
        (b'{"messages":[{"role":"user","content":"x"}],"t":NaN}', None, "NaN"),
        (b'{"messages":[{"role":"user","content":"x"}],"t":' + b"9" * 5000 + b"}", None, "JSON"),
        (b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * 2000 + b"]" * 2000 + b"}", None, "128 levels"),
    ],
)
def test_bad_bodies_are_clear_errors(raw: bytes, param: str | None, hint: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Prompt.from_body(raw)
    assert caught.value.param == param
    assert hint in caught.value.message


def test_brackets_inside_strings_do_not_count_as_depth() -> None:
    text = '[[["' * 500
    raw = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert Prompt.from_body(raw, max_depth=8).question == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "alien"])},
    optional={
        "content": st.text(max_size=40)
        | st.none()
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=20)}), max_size=3),
        "extra": json_values,
        "tool_calls": json_values,
    },
)


@pytest.mark.slow
@given(
    st.lists(message, min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(["a", "b", "temperature"]), json_values),
    st.booleans(),
    st.sampled_from([None, 1, "\t"]),
    st.data(),
)
def test_any_edit_changes_only_its_leaf(
    messages: list[dict[str, Any]], fields: dict[str, Any], ascii_only: bool, indent: Any, data: st.DataObject
) -> None:
    document = {**fields, "messages": messages}
    try:
        raw = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    except UnicodeEncodeError:
        return  # hypothesis drew half of a surrogate pair
    try:
        prompt = Prompt.from_body(raw)
    except BadRequest as exc:
        assert exc.code == "invalid_unicode"
        return
    assert prompt.render() == raw
    open_ids = [segment.id for segment in prompt.segments if segment.rewritable]
    if not open_ids:
        return
    target = prompt.segment(data.draw(st.sampled_from(open_ids)))
    new = data.draw(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=10))
    rendered = json.loads(prompt.replace({target.id: new}).render())
    expected: Any = json.loads(raw)
    holder = expected
    for step in target.path[:-1]:
        holder = holder[step]
    pieces = [new if s.id == target.id else s.text for s in prompt.segments if s.path == target.path]
    holder[target.path[-1]] = "".join(pieces)
    assert rendered == expected


@pytest.mark.slow
@given(st.lists(st.sampled_from(["user", "assistant", "call", "tool"]), min_size=1, max_size=8), st.data())
def test_dropping_any_units_leaves_valid_json(roles: list[str], data: st.DataObject) -> None:
    messages = [
        {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
        if role == "call"
        else {"role": role, "content": f"text {i}"}
        for i, role in enumerate(roles)
    ]
    prompt = Prompt.from_body(json.dumps({"messages": messages}).encode())
    units = {segment.unit for segment in prompt.segments}
    gone = data.draw(st.sets(st.sampled_from(sorted(units))))
    dropped = prompt.drop_units(gone)
    assert json.loads(dropped.render())["messages"] == dropped.messages
    kept_texts = [segment.text for segment in dropped.segments if segment.kind is not Kind.TOOL_CALL]
    assert [m["content"] for m in dropped.messages] == kept_texts
