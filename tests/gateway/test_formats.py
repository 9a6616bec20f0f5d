"""What of a request restricts its text: OpenAI's field, vLLM's fields, and what is wrong about either."""

from typing import Any

import pytest
from promptsluice.backend_engine.grammar import Grammar
from promptsluice.gateway.parameters import chat_parameters
from promptsluice.prompt import BadRequest

OBJECT: dict[str, Any] = {"type": "object"}


def wrapped(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": wrapped({"type": "integer"})}, Grammar.json_schema({"type": "integer"})),
        ({"response_format": wrapped(OBJECT, strict=True, description="d")}, Grammar.json_schema(OBJECT)),
        ({"response_format": wrapped(True, strict=None)}, Grammar.json_schema(True)),
        ({"guided_json": OBJECT}, Grammar.json_schema(OBJECT)),
        ({"guided_json": '{"type": "object"}'}, Grammar.json_schema(OBJECT)),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["a+", "b"]}, Grammar.choice(["a+", "b"])),
        ({"structured_outputs": {"json": OBJECT, "grammar": None, "regex": None}}, Grammar.json_schema(OBJECT)),
        ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a+", "b"]}}, Grammar.choice(["a+", "b"])),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        (
            {"guided_json": OBJECT, "response_format": {"type": "text"}, "guided_regex": None},
            Grammar.json_schema(OBJECT),
        ),
    ],
)
def test_a_field_becomes_a_grammar(fields: dict[str, Any], grammar: Grammar) -> None:
    parameters = chat_parameters(fields)
    assert parameters.structured
    found = parameters.grammar()
    assert found == grammar
    assert found.param.split(".")[0] in fields


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_plain_text_has_none(fields: dict[str, Any]) -> None:
    assert not chat_parameters(fields).structured


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": "json_object"}, "response_format", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format", "invalid_value"),
        ({"response_format": {**wrapped(OBJECT), "x": 1}}, "response_format.x", "unsupported_parameter"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "missing_parameter",
        ),
        (
            {"response_format": wrapped({"items": {"uniqueItems": True}})},
            "response_format.json_schema.schema.items.uniqueItems",
            "invalid_value",
        ),
        ({"response_format": wrapped(False)}, "response_format.json_schema.schema", "invalid_value"),
        ({"guided_json": [1]}, "guided_json", "invalid_value"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": "[" * 100_000}, "guided_json", "invalid_value"),
        ({"guided_regex": 5}, "guided_regex", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"guided_choice": [1]}, "guided_choice[0]", "invalid_value"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "unsupported_parameter"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "unsupported_parameter"),
        ({"structured_outputs": 5}, "structured_outputs", "invalid_value"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "invalid_value"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_parameters(fields).grammar()
    assert (caught.value.param, caught.value.code) == (param, code)
