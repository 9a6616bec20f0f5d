"""Reading JSON: what the standard library reads, member by member, and which members may not stand twice."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.prompt import BadRequest
from promptsluice.prompt.jsontext import DECIDED, parse

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab\\"é{}[],:'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=8,
)
tokens = st.sampled_from([*'{}[]:, \n"a1-', "null", '"a"', '"b"', "1e5", "NaN", "tru", "\\u0061", "\ufeff"])


def read(text: str) -> Any:
    try:
        return parse(text, max_depth=50)
    except BadRequest as error:
        return error.message


def loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"


@pytest.mark.slow
@given(values, st.sampled_from([None, 2]), st.sampled_from(["", " ", "\n\t"]))
def test_whatever_is_json_is_read_as_the_standard_library_does(value: Any, indent: int | None, around: str) -> None:
    text = around + json.dumps(value, indent=indent) + around
    assert read(text) == value


@given(st.lists(tokens, max_size=12).map("".join))
def test_whatever_is_broken_is_told_as_the_standard_library_does(text: str) -> None:
    if "NaN" in text:
        return
    for one in (text, "{" + text + "}", '{"a":1,' + text):
        assert read(one) == loaded(one)


@pytest.mark.slow
@given(st.sampled_from(sorted(DECIDED)), st.booleans(), st.data())
def test_fields_that_decide_stand_once_and_in_one_spelling(name: str, escaped: bool, data: st.DataObject) -> None:
    other = "".join(data.draw(st.sampled_from([letter, letter.upper()])) for letter in name)
    member = f"{ord(other[0]):04x}"
    again = f"\\u{member}{other[1:]}" if escaped else other
    text = f'{{"x": {{"{name}": 1, "{name}": 2}}, "{name}": 1, "y": 3, "{again}": 2}}'
    with pytest.raises(BadRequest, match="is given twice" if other == name else "another spelling") as refused:
        parse(text, max_depth=5)
    assert refused.value.param == other and refused.value.code == "ambiguous_field"


def test_other_fields_may_stand_twice_and_the_last_one_counts() -> None:
    assert parse('{"a": 1, "A": 2, "a": 3, "x": {"model": 1, "Model": 2}}', max_depth=5)["a"] == 3


def test_options_of_a_stream_stand_once_and_in_one_spelling() -> None:
    for options in ('{"include_usage": true, "x": {"x": [1]}, "include_usage": false}', '{"Include_Usage" : true}'):
        with pytest.raises(BadRequest, match=r"stream_options\.") as refused:
            parse('{"model": "m", "stream_options": ' + options + ', "stream": true}', max_depth=5)
        assert refused.value.code == "ambiguous_field"
        assert str(refused.value.param).lower() == "stream_options.include_usage"
    for options in ("{}", "null", "[]", '{"include_usage": true, "y": 1, "y": 2}'):
        text = '{"stream_options": ' + options + ', "x": 1}'
        assert parse(text, max_depth=5) == json.loads(text)
