"""Whatever is done to a policy file, loading it gives a PolicySet or errors with file and line; never anything else."""

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from promptsluice.policies import PolicyFileError, PolicySet

EXAMPLE = (Path(__file__).parents[2] / "examples" / "policies" / "team.yaml").read_text("utf-8")
LINES = EXAMPLE.splitlines()
YAML_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
KEY = re.compile(r"[a-z_]{4,}(?=:)")


def load(text: str) -> PolicyFileError | None:
    try:
        PolicySet.from_text(text, file="m.yaml")
    except PolicyFileError as error:
        lines = len(YAML_BREAK.split(text))
        for problem in error.problems:
            assert 1 <= problem.line <= lines
            assert problem.message
        assert str(error).startswith(f"m.yaml:{error.problems[0].line}: ")
        return error
    return None


@pytest.mark.slow
@given(st.integers(min_value=0, max_value=2**32))
@settings(max_examples=150, deadline=None)
def test_a_mutated_key_is_named_with_its_line(seed: int) -> None:
    rng = random.Random(seed)
    fixed = ("request_timeout", "max_body_bytes", "api_key_env", "token_value_ms", "allow_client_policy", "kv_memory")
    keys = [match for match in KEY.finditer(EXAMPLE) if match[0] in fixed]
    chosen = rng.choice(keys)
    at = rng.randrange(chosen.start(), chosen.end())
    text = EXAMPLE[:at] + rng.choice("xqzjkw") * rng.randint(1, 2) + EXAMPLE[at + rng.randint(0, 1) :]
    mutated = re.compile(r"\w+").match(text, chosen.start())
    assert mutated
    assume(mutated[0] != chosen[0])
    error = load(text)
    assert error is not None
    line = text.count("\n", 0, at) + 1
    messages = [problem.message for problem in error.problems if problem.line == line]
    assert any(repr(mutated[0]) in message and repr(chosen[0]) in message for message in messages), (
        mutated[0],
        messages,
    )


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, len(LINES) - 1), st.sampled_from(["drop", "twice", "indent", "swap"])), max_size=5
    )
)
@settings(max_examples=150, deadline=None)
def test_shuffled_lines(edits: list[tuple[int, str]]) -> None:
    lines = list(LINES)
    for at, edit in edits:
        at %= len(lines)
        if edit == "drop" and len(lines) > 1:
            del lines[at]
        elif edit == "twice":
            lines.insert(at, lines[at])
        elif edit == "indent":
            lines[at] = "  " + lines[at]
        else:
            lines[at], lines[at - 1] = lines[at - 1], lines[at]
    load("\n".join(lines))


@given(st.text(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_text(text: str) -> None:
    load(text)
    load("version: 1\n" + text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(
    st.sampled_from(
        ["server", "backends", "policies", "routes", "kv_cache", "collections", "models", "default_policy"]
    ),
    VALUES,
)
@settings(max_examples=200, deadline=None)
def test_any_value_in_any_section(section: str, value: object) -> None:
    load(f"version: 1\n{section}: {json.dumps(value)}\n")


@pytest.mark.slow
@given(VALUES, st.sampled_from(["b: {kind: embedded, model: %s}", "b: {kind: openai, models: %s}", "b: %s"]))
@settings(max_examples=100, deadline=None)
def test_any_value_in_a_backend(value: object, form: str) -> None:
    load(f"version: 1\nbackends:\n  {form % json.dumps(value)}\n")


@pytest.mark.slow
@given(
    VALUES, st.sampled_from(["compress", "retrieve", "reuse", "protect", "extends", "allow_client_policy", "quality"])
)
@settings(max_examples=200, deadline=None)
def test_any_value_in_a_policy(value: object, field: str) -> None:
    load(f"version: 1\npolicies:\n  p:\n    {field}: {json.dumps(value)}\n")
