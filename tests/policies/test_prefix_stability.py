"""Turn N+1 begins with turn N's rewritten prompt: planned and rewritten by the real compressors, turn after turn."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from promptsluice.compressors.context import CompressionContext
from promptsluice.compressors.registry import create
from promptsluice.policies import CostModel, Policy, PolicySet, opened, plan
from promptsluice.prompt import Prompt

TOPICS = ("valve", "turbine", "invoice", "harbour", "schedule", "archive", "signal", "garden")
GROUPS = ("early", "late", "northern", "careful", "second")


def words(text: str) -> int:
    return len(text.split())


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Bags of topics: enough for relevance to differ by question."""
    return np.array([[text.lower().count(topic) + 0.01 for topic in TOPICS] for text in texts], dtype=np.float32)


def rewritten(messages: list[dict[str, Any]], policy: Policy) -> list[dict[str, Any]]:
    prompt = opened(Prompt.from_messages(messages), policy)
    for step in plan(prompt, policy, CostModel(), count=words).steps:
        context = CompressionContext(count=words, question=prompt.question, embed=embed, only=step.segments)
        prompt = create(step.use, step.options).compress(prompt, context=context).prompt
    return prompt.messages


def prose(topic: str, sentences: int) -> str:
    return " ".join(
        f"The {TOPICS[(TOPICS.index(topic) + n % 3) % len(TOPICS)]} was seen by the {GROUPS[n % len(GROUPS)]} group."
        for n in range(sentences)
    )


AHEAD = [
    {"role": "user", "content": prose("turbine", 40)},
    {"role": "user", "content": "What happened to the turbine?"},
]
INSIDE = [{"role": "user", "content": f"<documents>{AHEAD[0]['content']}</documents>\n{AHEAD[1]['content']}"}]


def conversation(opening: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The requests of a session with documents, tool calls and long answers, in order."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You keep the station's books."}, *opening]
    requests = [list(messages)]
    for turn, topic in enumerate(("valve", "harbour", "archive", "garden")):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": prose(topic, 30)})
        requests.append(list(messages))
        messages.append({"role": "assistant", "content": prose(topic, 25)})
        messages.append(
            {"role": "user", "content": f"And what about the {topic}? " + prose("invoice", 20 * (turn % 2))}
        )
        requests.append(list(messages))
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("opening", [AHEAD, INSIDE], ids=["documents-ahead", "documents-inside"])
@pytest.mark.parametrize("least", [0, 600])
@pytest.mark.parametrize("preset", ["lossless", "balanced"])
def test_each_turn_keeps_the_rewritten_prefix(preset: str, least: int, opening: list[dict[str, Any]]) -> None:
    policy = PolicySet.default().policy(preset).model_copy(update={"min_prompt_tokens": least})
    requests = conversation(opening)
    sent = [rewritten(messages, policy) for messages in requests]
    for before, after in pairwise(sent):
        assert after[: len(before)] == before
    if preset == "balanced":
        assert (
            sum(words(str(m["content"])) for m in sent[-1]) < sum(words(str(m["content"])) for m in requests[-1]) * 0.9
        )


ROLES = st.sampled_from(["user", "assistant", "tool"])
TURNS = st.lists(st.tuples(ROLES, st.sampled_from(TOPICS), st.integers(0, 40)), min_size=2, max_size=9)


@pytest.mark.slow
@given(TURNS, st.integers(0, 900))
@settings(max_examples=60, deadline=None)
def test_decisions_depend_on_what_stands_before(turns: list[tuple[str, str, int]], least: int) -> None:
    policy = PolicySet.default().policy("balanced").model_copy(update={"min_prompt_tokens": least})
    messages = [{"role": role, "content": prose(topic, n), "tool_call_id": "x"} for role, topic, n in turns]
    # A request ends where the model is asked: before an assistant turn, or at the end.
    ends = [i for i, m in enumerate(messages) if i and m["role"] == "assistant"] + [len(messages)]
    plans = [plan(Prompt.from_messages(messages[:end]), policy, CostModel(), count=words) for end in ends]
    for before, after in pairwise(plans):
        for early, late in zip(before.decisions, after.decisions, strict=False):
            assert (early.action, early.uses, early.tokens_after) == (late.action, late.uses, late.tokens_after)
