"""Staged rollouts: who is drawn stays drawn, a raised percentage only adds, a hold-out stays out."""

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.policies import PolicyFileError, PolicySet
from promptsluice.policies.rollout import Group, beginning, drawn
from promptsluice.policies.schema import RolloutSpec
from promptsluice.prompt import Prompt

PERCENT = st.floats(0, 100)
CONVERSATION = st.binary(min_size=16, max_size=16)


def rollout(percent: float, holdout: float = 0.0, **more: Any) -> RolloutSpec:
    return RolloutSpec(policy="new", percent=percent, holdout=holdout, **more)


@given(PERCENT, PERCENT, PERCENT, CONVERSATION)
def test_a_raised_percentage_only_adds_and_a_holdout_stays(
    low: float, high: float, holdout: float, conversation: bytes
) -> None:
    low, high = sorted((low, high))
    before = drawn(rollout(low, holdout), key_sha256=None, conversation=conversation)
    after = drawn(rollout(high, holdout), key_sha256=None, conversation=conversation)
    if before is Group.ROLLOUT:
        assert after is Group.ROLLOUT
    assert (before is Group.HOLDOUT) == (after is Group.HOLDOUT)
    assert drawn(rollout(100), key_sha256=None, conversation=conversation) is Group.ROLLOUT
    assert drawn(rollout(0), key_sha256=None, conversation=conversation) is Group.BASE
    assert drawn(rollout(100, 100), key_sha256=None, conversation=conversation) is Group.HOLDOUT


def test_shares_are_what_they_are_called() -> None:
    spec = rollout(20, 10)
    groups = [drawn(spec, key_sha256=None, conversation=n.to_bytes(4)) for n in range(20_000)]
    assert groups.count(Group.ROLLOUT) == pytest.approx(4000, rel=0.05)
    assert groups.count(Group.HOLDOUT) == pytest.approx(2000, rel=0.05)
    # Another name draws others: who is in one rollout is not for that reason in the next.
    other = [drawn(rollout(20, 10, name="next"), key_sha256=None, conversation=n.to_bytes(4)) for n in range(20_000)]
    both = sum(a is b is Group.ROLLOUT for a, b in zip(groups, other, strict=True))
    assert both == pytest.approx(800, rel=0.15)


def test_by_key_all_conversations_of_a_key_stay_together() -> None:
    spec = rollout(50, by="key")
    for key in ("a" * 64, "b" * 64, "c" * 64):
        assert len({drawn(spec, key_sha256=key, conversation=bytes([n])) for n in range(40)}) == 1
    assert len({drawn(spec, key_sha256=None, conversation=bytes([n])) for n in range(40)}) == 2, "nobody has a key"


def prompt(*messages: tuple[str, str], **fields: Any) -> Prompt:
    return Prompt.from_messages([{"role": role, "content": text} for role, text in messages], **fields)


def test_all_turns_of_a_conversation_have_one_beginning() -> None:
    opening = (("system", "Be brief."), ("user", "<documents>long</documents>\n```\ncode\n```\nWhat is this?"))
    turns = [opening, (*opening, ("assistant", "That.")), (*opening, ("assistant", "That."), ("user", "And now?"))]
    found = {beginning(prompt(*turn)) for turn in turns}
    assert len(found) == 1
    assert beginning(prompt(*opening, tools=[{"type": "function", "function": {"name": "f"}}])) in found
    assert beginning(prompt(opening[0], ("user", "Something else"))) not in found
    assert beginning(prompt(("system", "Be."), opening[1])) not in found
    assert beginning(prompt(("user", "ab"), ("assistant", "c"))) != beginning(prompt(("user", "a"), ("user", "bc")))


FILE = """
version: 1
policies:
  lossless: {extends: lossless, allow_client_policy: [off]}
routes:
- match: {model: "smol*"}
  rollout: {policy: balanced, percent: PERCENT, holdout: 10}
  shadow: aggressive
  on_failure: closed
"""


def test_the_draw_decides_the_policy_and_says_so() -> None:
    groups: set[str | None] = set()
    for n in range(40):
        policies = PolicySet.from_text(FILE.replace("PERCENT", "40"))
        found = policies.resolve("smollm2-135m-instruct", conversation=lambda n=n: bytes([n]))
        assert found.policy_name == ("balanced" if found.group is Group.ROLLOUT else "lossless")
        assert found.rollout == "balanced" and f"group {found.group} of rollout balanced" in found.reason
        assert found.fail_closed and found.shadow == "aggressive"
        groups.add(found.group)
    assert groups == set(Group)


def test_who_chooses_or_has_no_conversation_is_part_of_no_rollout() -> None:
    policies = PolicySet.from_text(FILE.replace("PERCENT", "90"))
    asked = policies.resolve("smollm2-135m-instruct:off", conversation=lambda: b"x")
    assert (asked.policy_name, asked.rollout, asked.group) == ("off", "", None)
    assert policies.resolve("smollm2-135m-instruct").policy_name == "lossless"


def test_a_shadow_of_the_policy_itself_is_none() -> None:
    policies = PolicySet.from_text(FILE.replace("PERCENT", "90").replace("shadow: aggressive", "shadow: balanced"))
    names = {
        (found.policy_name, found.shadow)
        for n in range(60)
        for found in [policies.resolve("smollm2-135m-instruct", conversation=lambda n=n: bytes([n]))]
    }
    assert names == {("balanced", None), ("lossless", "balanced")}


@pytest.mark.parametrize(
    ("route", "says"),
    [
        ("{rollout: {policy: balanced, percent: 101}}", "percent"),
        ("{rollout: {policy: blanced, percent: 1}}", "routes[0].rollout.policy: unknown policy 'blanced'"),
        ("{rollout: {policy: off, percent: 1, name: 'a b'}}", "ASCII"),
        ("{rollout: {policy: off}}", "percent is required"),
        ("{rollout: {policy: off, percent: 5, by: user}}", "by"),
        ("{shadow: nope}", "routes[0].shadow: unknown policy 'nope'"),
        ("{on_failure: shut}", "on_failure"),
    ],
)
def test_mistakes_are_named(route: str, says: str) -> None:
    with pytest.raises(PolicyFileError) as caught:
        PolicySet.from_text(f"version: 1\nroutes:\n- {route}\n")
    assert caught.value.line == 3 and says in caught.value.message


def test_clients_choose_nothing_unless_the_file_says_so() -> None:
    digest = hashlib.sha256(b"k").hexdigest()
    for policies in (
        PolicySet.default(),
        PolicySet.from_text(f"version: 1\nserver: {{api_keys: [{{name: k, sha256: {digest}}}]}}"),
    ):
        for name in policies.policies.values():
            assert name.allow_client_policy == ()
