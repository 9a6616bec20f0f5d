"""What is reserved for a request before it is asked for, and what its stream is taken to have cost."""

from typing import Any

import pytest
from promptsluice.gateway.keys.spending import ASSUMED_OUTPUT, longest_answers
from promptsluice.prompt import BadRequest


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, ASSUMED_OUTPUT),
        ({"max_tokens": None, "n": None}, ASSUMED_OUTPUT),
        ({"max_tokens": 0}, ASSUMED_OUTPUT),
        ({"max_completion_tokens": 1, "max_tokens": 100_000}, 100_000),
        ({"max_completion_tokens": 1, "max_tokens": -1}, ASSUMED_OUTPUT),
        ({"max_tokens": 1, "n_predict": 5000}, 5000),
        ({"max_tokens": 1e2, "n": 3.0}, 300),
        ({"max_tokens": 10, "n": 2, "best_of": 20}, 200),
        ({"max_tokens": 10, "n": 4, "best_of": None}, 40),
        ({"max_tokens": 1 << 70, "n": 1 << 70}, 1 << 31),
    ],
)
def test_the_largest_of_what_a_request_says_is_reserved(body: dict[str, Any], tokens: int) -> None:
    assert longest_answers(body) == tokens


def test_each_prompt_has_its_answers() -> None:
    assert longest_answers({"max_tokens": 10, "n": 2}, prompts=1000) == 20_000


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"])
@pytest.mark.parametrize("value", ["4096", 1.5, float("inf"), float("nan"), True, [1]])
def test_what_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"{name} must be a whole number") as refused:
        longest_answers({name: value})
    assert refused.value.param == name
