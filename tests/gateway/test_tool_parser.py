"""Tool calls out of text: every dialect, however the text is cut, and what is no call stays text."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.gateway.tools.dialects import HERMES, LLAMA3, MISTRAL, Dialect, dialect_of
from promptsluice.gateway.tools.parser import ToolParser
from promptsluice.gateway.tools.pieces import CallBegun, Part, Said

NAMES = ("weather", "now")
ROME = '{"city": "Rome\\"}<", "days": [1, {"x": "]"}]}'


def read(dialect: Dialect, pieces: list[str], *, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call; what the parser promises of its order is checked."""
    parser = ToolParser(dialect, NAMES, most=most)
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.finish()
    text, calls = "", [["", ""] for _ in range(parser.calls)]
    ids: list[str] = []
    for part in parts:
        if isinstance(part, Said):
            assert part.text
            text += part.text
        elif isinstance(part, CallBegun):
            assert part.index == len(ids), "calls begin once each, in order"
            ids.append(part.id)
            calls[part.index][0] = part.name
        else:
            assert part.text and part.index == len(ids) - 1, "arguments belong to the call that has begun"
            calls[part.index][1] += part.text
    assert len(set(ids)) == len(ids) == parser.calls
    return text, [(name, arguments) for name, arguments in calls]


def call(arguments: str = ROME, *, key: str = "arguments") -> str:
    return f'{{"name": "weather", "{key}": {arguments}}}'


# What a model writes, the text that it is, and its calls.
WRITTEN: list[tuple[Dialect, str, str, list[tuple[str, str]]]] = [
    (HERMES, "Just text, 1 < 2 <tool> and a brace {.\n", "Just text, 1 < 2 <tool> and a brace {.\n", []),
    (HERMES, f"<tool_call>\n{call()}\n</tool_call>", "", [("weather", ROME)]),
    (HERMES, f"Let me see.\n\n<tool_call>{call()}</tool_call>\n", "Let me see.", [("weather", ROME)]),
    (
        HERMES,
        f'<tool_call>\n{call()}\n</tool_call>\n<tool_call>\n{{"arguments": {{}}, "name": "now"}}\n</tool_call>',
        "",
        [("weather", ROME), ("now", "{}")],
    ),
    (HERMES, f"<tool_call>{call()}</tool_call> Done.", " Done.", [("weather", ROME)]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    (HERMES, f"<tool_call>{call(json.dumps(ROME))}</tool_call>", "", [("weather", ROME)]),
    (HERMES, '<tool_call>{"id": 7, "name": "now", "x": [true, "}"], "arguments": {}}', "", [("now", "{}")]),
    (HERMES, f"<tool_call>{call()[:-9]}", "", [("weather", ROME[:-8])]),
    (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    (HERMES, "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    (HERMES, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, "text <tool_ca", "text <tool_ca", []),
    (MISTRAL, f"[TOOL_CALLS][{call()}]", "", [("weather", ROME)]),
    (MISTRAL, f'Hm. [TOOL_CALLS] [{call()}, {{"name": "now", "arguments": {{}}}}]', "Hm.",
     [("weather", ROME), ("now", "{}")]),
    (MISTRAL, f"[TOOL_CALLS]{call()}", "", [("weather", ROME)]),
    (MISTRAL, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (LLAMA3, call(key="parameters"), "", [("weather", ROME)]),
    (LLAMA3, f" <|python_tag|>{call(key='parameters')}", "", [("weather", ROME)]),
    (LLAMA3, f'{call(key="parameters")}; {{"name": "now", "parameters": {{}}}}', "",
     [("weather", ROME), ("now", "{}")]),
    (LLAMA3, f"Say {call(key='parameters')}", f"Say {call(key='parameters')}", []),
    (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA3, "{}", "{}", []),
    (LLAMA3, "<|py", "<|py", []),
    (LLAMA3, f"{call(key='parameters')}; <|python_tag|>{call(key='parameters')}", "",
     [("weather", ROME), ("weather", ROME)]),
    (HERMES, "Write\n<tool_call> first.", "Write\n<tool_call> first.", []),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "written", "text", "calls"), WRITTEN)
def test_what_a_model_writes(dialect: Dialect, written: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read(dialect, [written]) == (text, calls)
    assert read(dialect, list(written)) == (text, calls), "letter by letter"


@pytest.mark.slow
@given(data=st.data())
def test_however_it_is_cut(data: Any) -> None:
    dialect, written, text, calls = data.draw(st.sampled_from(WRITTEN))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=6)) | {0, len(written)})
    assert read(dialect, [written[a:b] for a, b in pairwise(cuts)]) == (text, calls)


@pytest.mark.slow
@given(written=st.text(alphabet='{}[]":,\\ \n<>tool_caname/x1', max_size=60))
def test_text_is_never_lost_without_a_call(written: str) -> None:
    for dialect in (HERMES, MISTRAL, LLAMA3):
        text, calls = read(dialect, list(written))
        assert calls or text == written


@pytest.mark.slow
@given(arguments=st.dictionaries(st.text(), st.recursive(st.text() | st.integers(), st.lists, max_leaves=4)))
def test_any_arguments_come_through(arguments: dict[str, Any]) -> None:
    told = json.dumps(arguments, ensure_ascii=False)
    assert read(HERMES, list(f"<tool_call>\n{call(told)}\n</tool_call>")) == ("", [("weather", told)])


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser(HERMES, NAMES)
    parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Ro')
    begun, arguments = ToolParser(HERMES, NAMES).feed('<tool_call>{"name": "weather", "arguments": {"city": "Ro')
    assert isinstance(begun, CallBegun) and not isinstance(arguments, Said | CallBegun)
    assert arguments.text == '{"city": "Ro'


@pytest.mark.parametrize("dialect", [HERMES, MISTRAL, LLAMA3])
def test_no_more_calls_than_may_be(dialect: Dialect) -> None:
    one = call(key=dialect.arguments)
    written = {
        HERMES: f"<tool_call>{one}</tool_call>\n<tool_call>{one}</tool_call>",
        MISTRAL: f"[TOOL_CALLS][{one}, {one}]",
        LLAMA3: f"{one}; {one}",
    }[dialect]
    assert read(dialect, [written], most=1) == ("", [("weather", ROME)])
    assert len(read(dialect, [written])[1]) == 2


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{ tools }} return <tool_call>\n{...}\n</tool_call>", HERMES),
        ("<tool_call>\n<function=name>", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", MISTRAL),
        ("[TOOL_CALLS]name[ARGS]{}", None),
        ('<|start_header_id|> {"name": name, "parameters": values} <|python_tag|>', LLAMA3),
        ("no tools", None),
        ("", None),
    ],
)
def test_dialects_are_read_off_templates(template: str, dialect: Dialect | None) -> None:
    assert dialect_of(template) == dialect


def test_ids_have_the_form_that_templates_take() -> None:
    assert MISTRAL.new_id().isalnum() and len(MISTRAL.new_id()) == 9
    assert HERMES.new_id().startswith("call_") and HERMES.new_id() != HERMES.new_id()
