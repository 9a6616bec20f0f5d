"""Budgets of a policy: never beyond them, at no segment, and no turn decides anew what an earlier one decided."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.policies import CostModel, Plan, Policy, PolicyFileError, PolicySet, plan
from promptsluice.policies.costs import Line
from promptsluice.prompt import Prompt

COSTS = CostModel(methods={"extractive-auto": Line(2.0, 0.1), "lossless": Line(0.0, 0.001)})


def policy(**budget: Any) -> Policy:
    steps = ({"use": "lossless"}, {"use": "extractive", "target_rate": 0.4, "min_tokens": 20})
    return Policy.model_validate({"compress": steps, "token_value_ms": 50.0, "budget": budget})


def words(text: str) -> int:
    return len(text.split())


def turns(*sizes: int) -> list[dict[str, Any]]:
    """Questions of one word and answers of so many."""
    pairs = (
        ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "because " * size}) for size in sizes
    )
    return [message for pair in pairs for message in pair] + [{"role": "user", "content": "So?"}]


def made(messages: list[dict[str, Any]], by: Policy) -> Plan:
    return plan(Prompt.from_messages(messages), by, COSTS, count=words)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.floats(0, 1), st.floats(1, 200))
@settings(max_examples=150)
def test_a_budget_is_kept_at_every_segment_and_over_all_turns(sizes: list[int], share: float, ms: float) -> None:
    by = policy(max_removed=share, rewrite_ms=ms)
    plans = [made(turns(*sizes[:n]), by) for n in range(1, len(sizes) + 1)]
    for one in plans:
        reached = removed = 0
        spent = 0.0
        for decision in one.decisions:
            reached += decision.tokens
            removed += decision.removed
            spent += decision.ms
            assert removed <= share * reached + 1e-6
            assert spent <= ms + 1e-6
    for before, after in pairwise(plans):
        kept = len(before.decisions) - 1
        assert [d.uses for d in after.decisions[:kept]] == [d.uses for d in before.decisions[:kept]]


def test_what_does_not_fit_in_says_so_and_lossless_steps_lose_nothing() -> None:
    none = made(turns(100, 100), policy(max_removed=0)).decisions
    assert [d.uses for d in none if d.role == "assistant"] == [("lossless",)] * 2
    assert "extractive would take more than 0% of the prompt (budget)" in none[1].reason
    assert [verdict.code for verdict in none[1].methods] == ["used", "budget_removed"]
    late = made(turns(100, 100), policy(rewrite_ms=15)).decisions
    assert late[1].uses == ("lossless", "extractive") and late[3].uses == ("lossless",)
    assert late[3].methods[1].code == "budget_ms" and "15 ms (budget)" in late[3].reason
    free = made(turns(100, 100), policy()).decisions
    assert [d.uses for d in free if d.role == "assistant"] == [("lossless", "extractive")] * 2


@pytest.mark.parametrize("budget", ["{max_removed: 1.1}", "{max_removed: -1}", "{rewrite_ms: 0}", "{ms: 5}", "7"])
def test_a_wrong_budget_is_named(budget: str) -> None:
    with pytest.raises(PolicyFileError, match="budget"):
        PolicySet.from_text(f"version: 1\npolicies:\n  p: {{budget: {budget}}}\n")
