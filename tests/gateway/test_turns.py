"""Turns that were rewritten once: the next request sends the same text, whoever would decide otherwise by now."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.optimization import Optimized, Tools, optimized
from promptsluice.gateway.turns import Turns, scope_of
from promptsluice.policies import CostModel, Ledger, Policy, opened
from promptsluice.policies.costs import Line
from promptsluice.prompt import Prompt

SPACES = "The valve was replaced.      \n\n\n\n\n" * 30
LOSSLESS = Policy.model_validate({"compress": ({"use": "lossless"},)})
DEAR = CostModel(methods={"lossless": Line(1e6, 1e6)})
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Which valve?"},
    {"role": "assistant", "content": SPACES},
    {"role": "user", "content": "And when?"},
]


def words(text: str) -> int:
    return len(text)


def nothing_found(*_: object, **__: object) -> Any:
    raise AssertionError("no policy here retrieves")


def run(
    messages: list[dict[str, Any]],
    turns: Turns,
    *,
    costs: CostModel | None = None,
    policy: Policy = LOSSLESS,
    scope: str = "a",
) -> Optimized:
    tools = Tools(
        count=words, costs=lambda: costs or CostModel(), ledger=Ledger(CostModel()), retrieve=nothing_found, turns=turns
    )
    return optimized(Prompt.from_messages(messages), policy, tools, request_id="r", scope=scope)


def test_a_decision_stays_when_costs_have_changed() -> None:
    turns = Turns(1 << 20)
    first = run(TALK, turns)
    assert len(first.prompt.messages[1]["content"]) < len(SPACES)
    longer = [*TALK, {"role": "assistant", "content": SPACES + "x"}, {"role": "user", "content": "Why?"}]
    second = run(longer, turns, costs=DEAR)
    assert second.prompt.messages[:3] == first.prompt.messages
    assert second.prompt.messages[3:] == longer[3:], "what is new is decided by what it costs now"
    assert [step.name for step in second.steps] == ["turns"]
    assert second.tokens_in == sum(words(message["content"]) for message in longer)
    assert second.pruned == first.pruned > 0
    assert second.plan is not None
    assert "earlier turn" in second.plan.decisions[1].reason


def test_what_was_left_alone_stays_alone() -> None:
    turns = Turns(1 << 20)
    assert not run(TALK, turns, costs=DEAR).prompt.changed
    longer = [*TALK, {"role": "assistant", "content": SPACES + "x"}, {"role": "user", "content": "Why?"}]
    second = run(longer, turns)
    assert second.prompt.messages[:3] == TALK
    assert second.prompt.messages[3]["content"] != longer[3]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["other tenant", "", "a "])
def test_scopes_know_nothing_of_each_other(scope: str) -> None:
    turns = Turns(1 << 20)
    run(TALK, turns)
    assert not run(TALK, turns, costs=DEAR, scope=scope).prompt.changed


def test_scopes_of_other_parts_differ() -> None:
    parts = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("a", "b", "d"), ("b", "b", "c")]
    scopes = [scope_of(*three, policy) for three in parts for policy in (LOSSLESS, Policy())]
    assert len(set(scopes)) == 10
    assert scope_of("a", "b", "c", LOSSLESS) == scopes[0]


@pytest.mark.parametrize("place", [0, 1])
def test_a_changed_beginning_is_another_conversation(place: int) -> None:
    turns = Turns(1 << 20)
    run(TALK, turns)
    other = [dict(message) for message in TALK]
    other[place]["content"] += " "
    assert not run(other, turns, costs=DEAR).prompt.changed


def test_fields_beside_the_text_belong_to_a_message() -> None:
    turns = Turns(1 << 20)
    run(TALK, turns)
    named = [TALK[0], {**TALK[1], "name": "other"}, TALK[2]]
    assert not run(named, turns, costs=DEAR).prompt.changed


def test_a_last_message_that_was_opened_goes_on_as_it_was_sent() -> None:
    policy = Policy.model_validate({"compress": ({"use": "lossless"},), "protect": {"last_user": False}})
    turns = Turns(1 << 20)
    asked = [{"role": "user", "content": f"<documents>{SPACES}</documents>\nWhich valve?"}]
    first = run(asked, turns, policy=policy)
    assert first.prompt.changed
    longer = [*asked, {"role": "assistant", "content": "The third."}, {"role": "user", "content": "When?"}]
    second = run(longer, turns, policy=policy)
    assert second.prompt.messages[0] == first.prompt.messages[0]
    assert second.prompt.messages[1:] == longer[1:]
    assert second.prompt.question == "When?"
    again = run(asked, turns, policy=policy, costs=DEAR)
    assert again.prompt.messages == first.prompt.messages
    assert again.prompt.question == Prompt.from_messages(asked).question


def test_retrieved_text_is_not_remembered() -> None:
    turns = Turns(1 << 20)
    came = opened(Prompt.from_messages(TALK), LOSSLESS)
    last = came.segments[-1]
    sent = came.insert_before(last.id, [("A chunk. ", "docs/1")])
    turns.remember(came, sent, scope="a")
    recalled, settled = turns.recall(came, scope="a")
    assert settled == dict.fromkeys((segment.id for segment in came.segments), 0)
    assert not recalled.changed


def test_what_lossy_steps_took_is_remembered() -> None:
    shorten = {"use": "extractive", "min_tokens": 20, "options": {"relevance": "words"}}
    policy = Policy.model_validate({"compress": ({"use": "lossless"}, shorten), "token_value_ms": 100})
    things = ("valve", "pump", "lake", "boat", "people", "water", "story", "north", "engine", "garden")
    story = "".join(f"The old {a} was left beside the {b} in the rain.    \n" for a in things for b in things)
    talk = [TALK[0], {"role": "assistant", "content": story}, TALK[2]]
    turns = Turns(1 << 20)
    first = run(talk, turns, policy=policy)
    taken = {step.name: step.tokens_before - step.tokens_after for step in first.steps}
    assert taken["lossless"] > 0 and taken["extractive"] > 0
    came = Prompt.from_messages(talk)
    asked, told, last = came.segments
    assert turns.recall(came, scope="a")[1] == {asked.id: 0, told.id: taken["extractive"], last.id: 0}


def test_messages_that_were_taken_out_are_not_remembered() -> None:
    turns = Turns(1 << 20)
    came = Prompt.from_messages(TALK)
    turns.remember(came, came.drop_units([came.segments[0].unit]), scope="a")
    assert not len(turns)


@pytest.mark.slow
def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    turns = Turns(40_000)
    for n in range(200):
        run([{**TALK[0], "content": f"Which valve? {n}"}, *TALK[1:]], turns)
        assert turns.held <= 40_000
    newest = [{**TALK[0], "content": "Which valve? 199"}, *TALK[1:]]
    oldest = [{**TALK[0], "content": "Which valve? 0"}, *TALK[1:]]
    assert run(newest, turns, costs=DEAR).prompt.changed
    assert not run(oldest, turns, costs=DEAR).prompt.changed


def test_a_conversation_that_is_cut_down_loses_its_end_first() -> None:
    turns = Turns(600)  # two messages, of which one prompt may have all
    came = Prompt.from_messages([{"role": "user", "content": str(n)} for n in range(5)])
    turns.remember(came, came, scope="a")
    assert turns.recall(came, scope="a")[1].keys() == {0, 1}


def test_one_prompt_leaves_the_others_theirs() -> None:
    turns = Turns(40_000)
    run(TALK, turns)
    run([{"role": "user", "content": str(n)} for n in range(500)], turns)
    assert run(TALK, turns, costs=DEAR).prompt.changed


def test_what_nobody_waits_for_is_not_remembered() -> None:
    turns = Turns(1 << 20)
    prompt, ledger = Prompt.from_messages(TALK), Ledger(CostModel())
    tools = Tools(count=words, costs=CostModel, ledger=ledger, retrieve=nothing_found, turns=turns)
    optimized(prompt, LOSSLESS, tools, request_id="r", scope="a", wanted=lambda: False)
    assert not len(turns)


def test_none_means_none() -> None:
    turns = Turns(0)
    run(TALK, turns)
    assert not len(turns)


@pytest.mark.slow
def test_threads() -> None:
    turns = Turns(50_000)
    wrong: list[object] = []

    def work(who: int) -> None:
        for n in range(30):
            talk = [{**TALK[0], "content": f"{who} {n % 7}"}, *TALK[1:]]
            if run(talk, turns).prompt.messages[1]["content"] == SPACES:
                wrong.append(talk)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


texts = st.text(st.sampled_from('ab \n\t{}[]"`#<>é漢'), max_size=60)
messages = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), min_size=1, max_size=6)


@pytest.mark.slow
@given(messages, messages)
def test_the_next_turn_begins_as_this_one_was_sent(first: list[tuple[str, str]], more: list[tuple[str, str]]) -> None:
    turns = Turns(1 << 20)
    talk = [{"role": role, "content": text} for role, text in first]
    sent = run(talk, turns).prompt
    longer = [*talk, *({"role": role, "content": text} for role, text in more)]
    after = run(longer, turns, costs=DEAR).prompt
    assert after.messages[: len(talk)] == sent.messages
    assert after.messages[len(talk) :] == longer[len(talk) :]


def test_the_echo_backend_has_costs_of_its_own() -> None:
    one, other = EchoBackend("one", models=["m"]), EchoBackend("other", models=["m"])
    for tokens in (1, 2, 3, 4, 5):
        one.ledger.ran("lossless", tokens=tokens, ms=7.0 * tokens)
    assert one.costs().methods["lossless"].per_token == pytest.approx(7.0)
    assert other.costs() == CostModel.upstream()
