"""The plan: what is decided for each segment, why, and that it never costs more than it saves."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.policies import Action, CostModel, Measurement, Plan, Policy, PolicySet, opened, plan
from promptsluice.policies.costs import Line
from promptsluice.policies.stored import Stretch
from promptsluice.prompt import Kind, Prompt

LONG = "The valve in hall seven was replaced in May. It had leaked since the winter before. " * 20
RAG = PolicySet.default().policy("rag")


def words(text: str) -> int:
    return len(text.split())


def policy(**fields: Any) -> Policy:
    return Policy.model_validate(fields)


def planned(messages: list[dict[str, Any]], chosen: Policy, costs: CostModel | None = None, **more: Any) -> Plan:
    return plan(opened(Prompt.from_messages(messages), chosen), chosen, costs or CostModel(), count=words, **more)


CHAT = [
    {"role": "system", "content": LONG},
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": f"{LONG}\n```\ncode()\n```\n"},
    {"role": "user", "content": "And when?"},
]
EXTRACT = policy(compress=({"use": "extractive", "target_rate": 0.5},))


def test_off_does_nothing() -> None:
    made = planned(CHAT, PolicySet.default().policy("off"))
    assert made.passthrough
    assert made.tokens_before == made.tokens_after
    assert made.prefill_ms == made.predicted_ms
    assert {decision.reason for decision in made.decisions} == {"the policy rewrites nothing"}


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            "code",
            "import os\n\n# what it does\ndef go():\n    # here\n    return os\n\n\nclass Other:\n    pass\n" * 20,
        ),
        ("diff", "@@ -1,3 +1,3 @@\n-old\n+new\n same\n same\n" * 20),
        ("html", "<html><body><p>" + "Words of a page.</p>\n<p>" * 40 + "</p></body></html>"),
    ],
)
def test_a_method_that_finds_nothing_of_its_kind_is_left_out(use: str, text: str) -> None:
    chosen = policy(compress=({"use": use, "kinds": ["tool_result"]},), token_value_ms=100.0)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for content, used in ((text, (use,)), (LONG, ())):
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": content},
            {"role": "user", "content": "So?"},
        ]
        (decision,) = (one for one in planned(messages, chosen).decisions if one.role == "tool")
        assert decision.uses == used
        assert decision.methods[0].code == ("used" if used else "nothing_to_take")


def test_every_segment_has_a_decision_and_a_reason() -> None:
    made = planned(CHAT, EXTRACT)
    assert [decision.segment for decision in made.decisions] == [0, 1, 2, 3, 4, 5]
    by_kind = {(decision.role, decision.kind): decision for decision in made.decisions}
    assert by_kind["system", Kind.SYSTEM].reason == "the system prompt is protected (protect.system)"
    assert "as it was first sent" in by_kind["user", Kind.HISTORY].reason
    assert by_kind["assistant", Kind.CODE].reason == "code is never rewritten"
    assert by_kind["user", Kind.QUESTION].reason == "the question is never rewritten"
    answer = made.decisions[2]
    assert (answer.action, answer.uses) == (Action.COMPRESS, ("extractive",))
    assert answer.tokens_after == answer.tokens // 2
    assert [step.name for step in made.steps] == ["extractive"]
    assert made.steps[0].segments == frozenset({2})
    assert made.predicted_ms < made.prefill_ms


def test_below_break_even_nothing_is_done() -> None:
    costs = CostModel(prefill=Line(0, 0.1), methods={"extractive-auto": Line(0, 0.06)})
    made = planned(CHAT, EXTRACT, costs)
    assert made.passthrough
    assert "would cost" in made.decisions[2].reason
    worth = policy(compress=({"use": "extractive", "target_rate": 0.5},), token_value_ms=0.1)
    assert not planned(CHAT, worth, costs).passthrough


def test_min_prompt_tokens_counts_up_to_the_segment() -> None:
    size = words(LONG)
    under = policy(compress=({"use": "extractive"},), min_prompt_tokens=size * 3 + 10)
    assert "min_prompt_tokens" in planned(CHAT, under).decisions[2].reason
    over = policy(compress=({"use": "extractive"},), min_prompt_tokens=size * 3)
    assert planned(CHAT, over).decisions[2].action is Action.COMPRESS


def test_protection_by_role_and_kind() -> None:
    messages = [*CHAT[:3], {"role": "tool", "tool_call_id": "c", "content": LONG}, CHAT[3]]
    steps = ({"use": "extractive"},)
    made = planned(messages, policy(compress=steps, protect={"roles": ("assistant",), "kinds": ("tool_result",)}))
    assert made.passthrough
    assert made.decisions[2].reason == "role assistant is protected by the policy (protect.roles)"
    assert made.decisions[5].reason == "kind tool_result is protected by the policy (protect.kinds)"


def test_documents_before_the_question_may_be_rewritten() -> None:
    ahead = [{"role": "user", "content": LONG}, {"role": "user", "content": "When?"}]
    assert planned(ahead, EXTRACT).decisions[0].action is Action.COMPRESS
    inside = [{"role": "user", "content": f"<documents>{LONG}</documents>\nQuestion: When?"}]
    assert planned(inside, EXTRACT).passthrough
    unlocked = policy(compress=({"use": "extractive"},), protect={"last_user": False})
    made = planned(inside, unlocked)
    assert [d.kind for d in made.decisions if d.action is Action.COMPRESS] == [Kind.DOCUMENT]


def test_two_entries_of_one_compressor_are_told_apart() -> None:
    steps = (
        {"use": "extractive", "kinds": ("history",), "target_rate": 0.7},
        {"use": "extractive", "kinds": ("tool_result",), "target_rate": 0.5},
    )
    made = planned([*CHAT[:3], {"role": "tool", "tool_call_id": "c", "content": LONG}, CHAT[3]], policy(compress=steps))
    assert [(step.name, step.use, step.options["target_rate"]) for step in made.steps] == [
        ("extractive", "extractive", 0.7),
        ("extractive#2", "extractive", 0.5),
    ]


def test_max_removed_bounds_all_lossy_steps_together() -> None:
    steps = ({"use": "extractive", "target_rate": 0.5}, {"use": "perplexity", "target_rate": 0.5})
    made = planned(CHAT, policy(compress=steps, quality={"max_removed": 0.6}, token_value_ms=100.0))
    assert [step.options["target_rate"] for step in made.steps] == [0.5, pytest.approx(0.8)]
    used_up = policy(compress=steps, quality={"max_removed": 0.5}, token_value_ms=100.0)
    assert "used up by quality.max_removed" in planned(CHAT, used_up).decisions[2].reason


def with_chunks(*texts: str) -> Prompt:
    prompt = Prompt.from_messages([{"role": "user", "content": "When?"}])
    pieces: list[tuple[str, str | None]] = [("<documents>\n", None)]
    return prompt.insert_before(0, [*pieces, *((text, f"d{i}") for i, text in enumerate(texts))])


def test_retrieved_chunks_are_blended_and_not_rewritten() -> None:
    lossy = RAG.model_copy(update={"compress": EXTRACT.compress})
    made = plan(with_chunks(LONG, "too short"), lossy, CostModel(), count=words)
    by_source = {decision.source: decision for decision in made.decisions}
    assert by_source["d0"].action is Action.BLEND
    assert "min_chunk_tokens" in by_source["d1"].reason
    assert [step.name for step in made.steps] == ["blend"]
    assert made.steps[0].options == {"ratio": 0.15, "selector": "auto"}
    assert made.predicted_ms < made.prefill_ms / 2


def test_chunks_are_compressed_where_kv_cannot_be_reused() -> None:
    lossy = RAG.model_copy(update={"compress": EXTRACT.compress})
    made = plan(with_chunks(LONG), lossy, CostModel(), count=words, kv_reuse=False)
    assert [step.name for step in made.steps] == ["extractive"]


def test_blending_that_does_not_pay_is_left() -> None:
    slow_disk = CostModel(load=Line(0, 50))
    made = plan(with_chunks(LONG), RAG, slow_disk, count=words)
    assert made.passthrough
    assert "stored KV would cost" in made.decisions[1].reason


def test_a_dry_run_shows_retrieval() -> None:
    made = planned([{"role": "user", "content": "When?"}], RAG)
    assert [(step.name, step.tokens_after) for step in made.steps] == [("retrieve", 2048)]
    assert made.predicted_ms < planned([{"role": "user", "content": "When?"}], RAG, kv_reuse=False).predicted_ms
    assert planned([{"role": "system", "content": "hi"}], RAG).passthrough


def test_plans_are_json() -> None:
    wire = json.loads(json.dumps(planned(CHAT, EXTRACT).to_wire()))
    assert wire["steps"][0]["segments"] == [2]
    assert wire["decisions"][2]["action"] == "compress"


MESSAGE = st.builds(
    lambda role, n: {"role": role, "content": LONG[: n * 9], "tool_call_id": "x"},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.integers(0, 180),
)


@given(
    st.lists(MESSAGE, min_size=1, max_size=6),
    st.floats(0, 5),
    st.floats(0, 5),
    st.floats(0, 50),
    st.sampled_from(["off", "lossless", "balanced", "aggressive"]),
)
@settings(max_examples=80, deadline=None)
def test_no_step_costs_more_than_it_saves(
    messages: list[dict[str, Any]], prefill: float, per_token: float, fixed: float, name: str
) -> None:
    costs = CostModel(prefill=Line(0, prefill), methods={}, unknown_method=Line(fixed, per_token))
    chosen = PolicySet.default().policy(name)
    made = planned(messages, chosen, costs)
    for step in made.steps:
        assert step.predicted_ms < step.saved_ms
        assert step.tokens_after < step.tokens_before
    for decision in made.decisions:
        assert decision.reason
        assert decision.tokens_after <= decision.tokens
    assert made.tokens_after == sum(decision.tokens_after for decision in made.decisions)
    assert planned(messages, chosen, costs) == made


def test_calibration_fits_lines_and_shrugs_off_stalls() -> None:
    seen = [Measurement("prefill", n, 5.0 + 2.0 * n) for n in (100, 200, 400, 800)]
    seen += [Measurement("prefill", 300, 9_999.0), Measurement("extractive", 100, 30.0), Measurement("load", 0, 1.0)]
    costs = CostModel().calibrate(seen)
    assert costs.prefill.per_token == pytest.approx(2.0)
    assert costs.prefill.fixed == pytest.approx(5.0)
    assert costs.compress_ms("extractive", 200) == pytest.approx(60.0)
    assert costs.load == CostModel().load
    assert costs.compress_ms("perplexity", 10) == CostModel().compress_ms("perplexity", 10)


class Store:
    """Of each text that is stored all tokens have KV; a stored token costs a fifth of another one."""

    def __init__(self, *texts: str, of_another: float = 0.2, measured: bool = True) -> None:
        self._texts, self._of_another, self._measured = texts, of_another, measured

    def known(self, text: str) -> int:
        return words(text) if text in self._texts else 0

    def prefill_ms(self, stretches: Sequence[Stretch], *, prefix: int) -> float | None:
        ms = sum(one.tokens - (1 - self._of_another) * one.stored for one in stretches) * 4.0
        return ms if self._measured else None


DOCUMENTS = [
    {"role": "user", "content": f"<document>{LONG}</document><document>{LONG}Or in June.</document>"},
    {"role": "user", "content": "When?"},
]
BLENDING = policy(compress=({"use": "extractive", "target_rate": 0.5},), reuse={"mode": "blend"})


def test_text_whose_kv_is_stored_is_left_where_the_whole_prompt_is_faster_for_it() -> None:
    def rewritten(chosen: Policy, store: Store) -> list[str]:
        made = planned(DOCUMENTS, chosen, store=store)
        return ["rewritten" if one.uses else one.code for one in made.decisions if one.kind is Kind.DOCUMENT]

    assert rewritten(BLENDING, Store()) == ["rewritten", "rewritten"]
    assert rewritten(BLENDING, Store(LONG)) == ["kv_kept", "rewritten"]
    assert rewritten(BLENDING, Store(LONG, f"{LONG}Or in June.")) == ["kv_kept", "kv_kept"]
    assert rewritten(BLENDING, Store(LONG, of_another=0.9)) == ["rewritten", "rewritten"], "half of it is faster"
    assert rewritten(EXTRACT, Store(LONG)) == ["rewritten", "rewritten"], "the policy uses no stored KV"
    assert rewritten(BLENDING, Store(LONG, measured=False)) == ["rewritten", "rewritten"], (
        "nothing speaks for keeping it"
    )
    dear = BLENDING.model_copy(update={"token_value_ms": 20.0})
    assert rewritten(dear, Store(LONG)) == ["rewritten", "rewritten"], "its tokens are worth more than their time"


def test_what_the_answering_model_reads_costs_a_prefill_however_slow_it_is_thought_to_be() -> None:
    """A machine that was busy when the backend measured itself must not make pruning by its own model look cheap."""
    prune = policy(compress=({"use": "perplexity", "target_rate": 0.5},))
    for per_token in (0.5, 4.0, 400.0):
        assert planned(CHAT, prune, CostModel(prefill=Line(0.0, per_token))).passthrough
    upstream = replace(CostModel.upstream(), prefill=Line(0.0, 400.0))
    assert not planned(CHAT, prune, upstream).passthrough, "there another model reads"


def test_two_passes_of_the_answering_model_cost_two_prefills() -> None:
    costs = CostModel(prefill=Line(0.0, 6.0))
    for contrast, passes in ((0.0, 1), (0.5, 2)):
        spec = {"use": "perplexity", "target_rate": 0.5, "options": {"contrast": contrast}}
        made = planned(CHAT, policy(compress=(spec,), token_value_ms=100.0), costs)
        (step,) = made.steps
        assert step.predicted_ms == passes * 6.0 * step.tokens_before


def test_what_a_run_costs_once_is_paid_for_once() -> None:
    turns = [{"role": role, "content": LONG} for _ in range(3) for role in ("user", "assistant")]
    costs = CostModel(prefill=Line(0.0, 1.0), methods={"extractive-auto": Line(100.0, 0.1)})
    made = planned([*turns, {"role": "user", "content": "When?"}], EXTRACT, costs)
    rewritten = [one for one in made.decisions if one.uses]
    each = words(LONG) * 0.1
    assert [one.ms for one in rewritten] == pytest.approx([100 + each, each, each])
    assert made.steps[0].predicted_ms == pytest.approx(100 + 3 * each)


def test_what_is_begun_costs_its_pass_over_the_text_all_the_same() -> None:
    costs = CostModel(prefill=Line(0.0, 4.0), methods={"perplexity": Line(200.0, 0.01)})
    assert costs.compress_ms("perplexity", 60) == 240.0
    assert costs.compress_ms("perplexity", 60, begun=True) == 240.0
    assert costs.compress_ms("perplexity", 0, begun=True) == 0.0


@pytest.mark.parametrize(("value", "embeds"), [(0.0, False), (20.0, True)])
def test_an_embedder_is_asked_only_where_that_pays(value: float, embeds: bool) -> None:
    costs = CostModel(prefill=Line(0.0, 0.5))
    for relevance, expected in (("auto", embeds), ("words", True)):
        spec = {"use": "extractive", "target_rate": 0.5, "options": {"relevance": relevance}}
        made = planned(CHAT, policy(compress=(spec,), token_value_ms=value), costs)
        assert [step.embeds for step in made.steps] == [expected]
