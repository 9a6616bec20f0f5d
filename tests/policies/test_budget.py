"""Budgets of a policy: never beyond them, at no segment, and no turn decides anew what an earlier one decided."""

from dataclasses import replace
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


@pytest.mark.slow
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


def test_what_has_no_target_may_take_all_and_no_text_is_taken_twice() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "word " * 100},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "@a # b c d\n" * 20},
        {"role": "user", "content": "So?"},
    ]
    steps = ({"use": "code"}, {"use": "extractive", "target_rate": 0.4, "min_tokens": 20})
    for share, used in ((0.4, ("extractive",)), (0.6, ("code", "extractive"))):
        budget = {"max_removed": share}
        by = Policy.model_validate({"compress": steps, "token_value_ms": 50.0, "budget": budget})
        (decision,) = (one for one in made(messages, by).decisions if one.role == "tool")
        assert decision.uses == used
        assert decision.removed == (60 if "code" not in used else 100)


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


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=4), st.lists(st.integers(1, 200), max_size=4), st.floats(0, 1)
)
@settings(max_examples=100)
def test_what_was_retrieved_counts_too_and_changes_nothing_before_it(
    sizes: list[int], chunks: list[int], share: float
) -> None:
    by = policy(max_removed=share, rewrite_ms=60)
    plain = Prompt.from_messages(turns(*sizes))
    found = plain.insert_before(plain.segments[-1].id, [("fact " * size, f"d/{at}") for at, size in enumerate(chunks)])
    without, one = (plan(prompt, by, COSTS, count=words, kv_reuse=False) for prompt in (plain, found))
    assert sum(decision.removed for decision in one.decisions) <= share * one.tokens_before + 1e-6
    assert sum(decision.ms for decision in one.decisions) <= 60 + 1e-6
    own = [decision for decision in one.decisions if decision.source is None]
    assert [d.uses for d in own] == [d.uses for d in without.decisions]


def test_a_budget_counts_what_is_asked_whatever_was_seen_to_be_taken() -> None:
    learned = replace(COSTS, missed={"extractive-auto": 0.9})
    by = policy(max_removed=0.5)
    plans = [plan(Prompt.from_messages(turns(100)), by, costs, count=words) for costs in (COSTS, learned)]
    assert [one.decisions[1].uses for one in plans] == [("lossless",)] * 2, "it may take 60 of 102 tokens"
    assert plans[1].decisions[1].methods[1].code == "budget_removed"


def test_a_target_in_tokens_is_what_a_budget_counts() -> None:
    step = {"use": "extractive", "min_tokens": 20, "options": {"target_tokens": 30}}
    for share, uses in ((0.65, ()), (0.7, ("extractive",))):
        by = Policy.model_validate({"compress": (step,), "token_value_ms": 50.0, "budget": {"max_removed": share}})
        (decision,) = [one for one in made(turns(100), by).decisions if one.role == "assistant"]
        assert decision.uses == uses, "it may take 70 of 102 tokens"


def test_of_an_earlier_turn_only_what_lossy_steps_took_is_counted() -> None:
    by = policy(max_removed=0.3)
    came = Prompt.from_messages(turns(100, 100))
    sent = came.settled({came.segments[1].id: "because " * 50})
    for lost, uses in ((3, ("lossless", "extractive")), (4, ("lossless",))):
        one = plan(sent, by, COSTS, count=words, settled={came.segments[0].id: 0, came.segments[1].id: lost})
        assert one.decisions[3].uses == uses, "60 of 202 tokens may go, of which 57 are asked for"


@pytest.mark.parametrize("budget", ["{max_removed: 1.1}", "{max_removed: -1}", "{rewrite_ms: 0}", "{ms: 5}", "7"])
def test_a_wrong_budget_is_named(budget: str) -> None:
    with pytest.raises(PolicyFileError, match="budget"):
        PolicySet.from_text(f"version: 1\npolicies:\n  p: {{budget: {budget}}}\n")
