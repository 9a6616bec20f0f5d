"""Costs that are learned from what ran: enough of it, not for ever, and never from one stalled run."""

import threading

import pytest
from promptsluice.policies import CostModel, Ledger, Policy, plan
from promptsluice.policies.costs import Line
from promptsluice.prompt import Prompt


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def words(text: str) -> int:
    return len(text.split())


def test_four_runs_are_not_enough_and_five_are() -> None:
    ledger = Ledger(CostModel())
    before = ledger.costs()
    for tokens in (100, 200, 300, 400):
        ledger.ran("extractive", tokens=tokens, ms=0.1 * tokens + 2)
    assert ledger.costs() == before
    ledger.ran("extractive", tokens=500, ms=52)
    line = ledger.costs().methods["extractive"]
    assert (line.fixed, line.per_token) == pytest.approx((2.0, 0.1))
    assert ledger.costs().methods["lossless"] == before.methods["lossless"]


def test_one_run_that_loaded_a_model_moves_nothing() -> None:
    ledger = Ledger(CostModel())
    ledger.ran("extractive", tokens=300, ms=5000)
    for tokens in (100, 200, 300, 400, 500):
        ledger.ran("extractive", tokens=tokens, ms=0.2 * tokens)
    assert ledger.costs().methods["extractive"].per_token == pytest.approx(0.2, rel=0.05)


def test_what_is_old_is_forgotten_so_that_a_method_is_tried_again() -> None:
    clock = Clock()
    ledger = Ledger(CostModel(), clock=clock)
    for tokens in (100, 200, 300, 400, 500):
        ledger.ran("extractive", tokens=tokens, ms=50.0 * tokens)
        ledger.left("lossless", expected=0.5, real=1.0)
    assert ledger.costs().methods["extractive"].per_token == pytest.approx(50.0)
    assert ledger.costs().missed["lossless"] > 0
    clock.now += 1200
    assert ledger.costs() == CostModel()


def test_the_wait_for_a_first_token_is_prefill_only_where_sizes_differ() -> None:
    ledger = Ledger(CostModel.upstream())
    for n in range(20):
        ledger.ran("prefill", tokens=400 + n, ms=300)
    assert ledger.costs().prefill == CostModel.upstream().prefill, "300 ms may all be the network"
    for tokens in (1000, 2000, 4000):
        ledger.ran("prefill", tokens=tokens, ms=300 + 0.05 * tokens)
    assert ledger.costs().prefill.per_token < 0.06
    assert ledger.costs().prefill.fixed == pytest.approx(300, rel=0.1)


def test_nothing_is_learned_from_nothing() -> None:
    ledger = Ledger(CostModel())
    for _ in range(9):
        ledger.ran("lossless", tokens=0, ms=3)
        ledger.ran("lossless", tokens=10, ms=-1)
    assert ledger.costs() == CostModel()


def test_protected_text_that_stays_is_expected_next_time() -> None:
    ledger = Ledger(CostModel())
    policy = Policy.model_validate({"compress": ({"use": "extractive", "target_rate": 0.5},)})
    messages = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "It was so. " * 100},
        {"role": "user", "content": "And?"},
    ]
    prompt = Prompt.from_messages(messages)
    assert plan(prompt, policy, ledger.costs(), count=words).decisions[1].tokens_after == 150
    for _ in range(60):
        ledger.left("extractive-auto", expected=0.5, real=0.75)
    decision = plan(prompt, policy, ledger.costs(), count=words).decisions[1]
    assert decision.tokens_after == pytest.approx(225, abs=2)
    assert decision.saved_ms == pytest.approx((300 - decision.tokens_after) * 4.0)


def test_of_a_method_without_a_target_it_is_learned_what_it_leaves() -> None:
    ledger = Ledger(CostModel())
    policy = Policy.model_validate(
        {
            "compress": (
                {"use": "code", "options": {"bodies": True}},
                {"use": "extractive", "target_rate": 0.5},
            ),
            "quality": {"max_removed": 0.6},
        }
    )
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "@a # b\n" * 100},
        {"role": "user", "content": "And?"},
    ]
    prompt = Prompt.from_messages(messages)
    before = plan(prompt, policy, ledger.costs(), count=words)
    for _ in range(60):
        ledger.left("code-comments-bodies", expected=None, real=0.3)
    after = plan(prompt, policy, ledger.costs(), count=words)
    assert [step.tokens_after for step in before.steps[:1]] == [285]
    assert after.steps[0].tokens_after == pytest.approx(90, abs=2)
    assert before.steps[0].asked_rate is None
    assert before.steps[1].asked_rate == after.steps[1].asked_rate, "what others are asked stays as it was"
    assert ledger.costs().expected_rate("code") == CostModel().unknown_rate


def test_a_method_that_takes_less_than_it_promises_soon_shows_it() -> None:
    ledger = Ledger(CostModel())
    rates: list[float] = []
    for _ in range(4):
        ledger.left("extractive-auto", expected=0.5, real=0.9)
        rates.append(ledger.costs().reached_rate("extractive-auto", 0.5))
    assert rates == sorted(rates) and rates[0] < 0.65 < 0.75 < rates[-1] < 0.9


def test_what_was_predicted_and_what_it_took() -> None:
    ledger = Ledger(CostModel())
    ledger.ran("lossless", tokens=100, ms=4, predicted_ms=3)
    ledger.ran("lossless", tokens=100, ms=6, predicted_ms=3)
    ledger.ran("prefill", tokens=100, ms=6)
    assert ledger.accuracy() == {"lossless": (6.0, 10.0)}


def test_threads_may_write_and_read() -> None:
    ledger = Ledger(CostModel())

    def work() -> None:
        for n in range(1, 200):
            ledger.ran("lossless", tokens=n, ms=0.01 * n, predicted_ms=1.0)
            ledger.left("lossless", expected=0.9, real=0.9)
            ledger.costs()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.costs().methods["lossless"].per_token == pytest.approx(0.01)
    assert ledger.accuracy()["lossless"][0] == 4 * 199


def test_what_gains_a_tenth_at_most_is_left() -> None:
    messages = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "It was so. " * 100},
        {"role": "user", "content": "And?"},
    ]
    policy = Policy.model_validate({"compress": ({"use": "extractive", "target_rate": 0.5},)})
    for cost, expected in ((0.46, True), (0.44, False)):
        costs = CostModel(prefill=Line(0, 1.0), methods={"extractive-auto": Line(0, cost)})
        assert plan(Prompt.from_messages(messages), policy, costs, count=words).passthrough is expected
