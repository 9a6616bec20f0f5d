"""Real conversations of an agent with tools: a request's rewritten prompt begins with that of the request before."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray
from promptsluice.compressors.context import CompressionContext
from promptsluice.compressors.registry import create, names
from promptsluice.policies import PRESETS, CostModel, Policy, PolicySet, opened, plan
from promptsluice.prompt import Prompt

Messages = list[dict[str, Any]]
SAMPLE = Path(__file__).parents[1] / "data" / "policies" / "airline.jsonl"
WORD = re.compile(r"\w+")
# What each compressor is given here reaches far more text than a sane policy would let it, or little would happen.
ALONE = """
version: 1
policies:
  alone:
    compress: [{use: NAME, kinds: [document, history, tool_result], min_tokens: 8}]
    protect: {system: SYSTEM}
    token_value_ms: 1000
    min_prompt_tokens: LEAST
"""


def words(text: str) -> int:
    return len(WORD.findall(text))


@cache
def vector(text: str) -> NDArray[np.float32]:
    """A bag of hashed words."""
    counts = np.zeros(256, np.float32)
    for word in WORD.findall(text.lower()):
        counts[crc32(word.encode()) % 256] += 1
    return counts + np.float32(0.01)


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    return np.stack([vector(text) for text in texts])


def score(
    texts: Sequence[str], *, wanted: object = None, given: str = "", remaining: Callable[[], float]
) -> Iterator[tuple[int, NDArray[np.float64], int]]:
    """Words that a hash finds more or less surprising."""
    for number, text in enumerate(texts):
        found = [(m.start(), m.end(), -(crc32(m[0].encode()) % 100) / 10) for m in WORD.finditer(text)]
        yield number, np.array(found, dtype=np.float64).reshape(-1, 3), len(text)


def rewritten(messages: Messages, policy: Policy) -> Messages:
    prompt = opened(Prompt.from_messages(messages), policy)
    for step in plan(prompt, policy, CostModel(), count=words, kv_reuse=False).steps:
        context = CompressionContext(
            count=words, question=prompt.question, embed=embed, score=score, only=step.segments
        )
        if step.use:
            prompt = create(step.use, step.options).compress(prompt, context=context).prompt
    return prompt.messages


def requests(messages: Messages) -> Iterator[Messages]:
    """What a client sends, in order: everything up to each of the assistant's turns, and all of it."""
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            yield messages[:i]
    yield messages


def conversations() -> list[Messages]:
    return [json.loads(line)["messages"] for line in SAMPLE.read_text("utf-8").splitlines()]


def shared(policy: Policy) -> Mapping[str, float]:
    """Every pair of turns is checked; how many there were, and the words that came and went out in the last ones."""
    pairs = came = went = 0
    for conversation in conversations():
        sent = [rewritten(messages, policy) for messages in requests(conversation)]
        for before, after in pairwise(sent):
            assert after[: len(before)] == before
            pairs += 1
        came += sum(words(str(message.get("content"))) for message in conversation)
        went += sum(words(str(message.get("content"))) for message in sent[-1])
    return {"pairs": pairs, "came": came, "went": went}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_breaks_a_prefix(preset: str) -> None:
    policy = PolicySet.default().policy(preset).model_copy(update={"token_value_ms": 1000.0})
    found = shared(policy)
    assert found["pairs"] > 40
    if preset == "aggressive":
        assert found["went"] < found["came"], "what is left of the others here is protected"


@pytest.mark.slow
@pytest.mark.parametrize(("system", "least"), [("true", 0), ("false", 900)])
@pytest.mark.parametrize("use", names())
def test_no_compressor_breaks_a_prefix(use: str, system: str, least: int) -> None:
    text = ALONE.replace("NAME", use).replace("SYSTEM", system).replace("LEAST", str(least))
    found = shared(PolicySet.from_text(text).policy("alone"))
    assert found["pairs"] > 40
    # Nearly all of these conversations must stay; extractive also leaves the sentence that is nearest to a question.
    most = {"perplexity": 0.95, "extractive": 0.96}.get(use)
    assert most is None or found["went"] < most * found["came"], "or nothing was shown"
