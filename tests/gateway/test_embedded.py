"""The embedded backend's own arithmetic, without a model: caps, sizes, chunk marks, and a model that cannot be had."""

import json
from pathlib import Path

import pytest
from promptsluice.backend_engine.types import SamplingParams
from promptsluice.gateway.backends.embedded import EmbeddedBackend, capped, count_template
from promptsluice.gateway.backends.engine_room import marks
from promptsluice.kv_reuse import EmptyStore
from promptsluice.policies.schema import EmbeddedBackend as Spec
from promptsluice.prompt import ContextTooLong, ModelUnavailable, Prompt, Report


@pytest.mark.parametrize(("asked", "given"), [(None, 90), (5, 5), (0, 0), (1 << 60, 90)])
def test_max_tokens_is_a_cap(asked: int | None, given: int) -> None:
    assert capped(SamplingParams(max_tokens=asked), prompt=10, limit=100).max_tokens == given


@pytest.mark.parametrize("prompt", [100, 101, 10_000])
def test_a_prompt_without_room_for_an_answer(prompt: int) -> None:
    with pytest.raises(ContextTooLong, match=f"has {prompt} tokens.*shorten it by {prompt - 99}"):
        capped(SamplingParams(max_tokens=1), prompt=prompt, limit=100)


def test_the_templates_tokens_count_before_and_after() -> None:
    report = Report(tokens_in=100, tokens_out=60)
    count_template(report, 75)
    assert (report.tokens_in, report.tokens_out) == (115, 75)


def test_marks_are_the_chunks_characters() -> None:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "What is it?"}]
    body = {"model": "m", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    body["messages"].append({"role": "user", "content": parts})
    prompt = Prompt.from_body(json.dumps(body).encode())
    question = prompt.segments[-1]
    pieces = [("<open>\n", None), ("chunk one", "d#0"), ("\n--\n", None), ("chunk two", "d#1"), ("\n", None)]
    prompt = prompt.insert_before(question.id, pieces).drop_units({0})
    chunks = frozenset(segment.id for segment in prompt.segments if segment.source is not None)
    found = [
        prompt.messages[mark.message]["content"][mark.part]["text"][mark.start : mark.end]
        for _, mark in marks(prompt, chunks)
    ]
    assert found == ["chunk one", "chunk two"]
    assert [segment.source for segment, _ in marks(prompt, chunks)] == ["d#0", "d#1"]
    assert marks(prompt, frozenset()) == []


async def test_a_model_that_cannot_be_had() -> None:
    def missing() -> Path:
        raise ModelUnavailable("run: promptsluice models pull x")

    backend = EmbeddedBackend("local", Spec(kind="embedded", model="x"), path=missing, store=EmptyStore)
    await backend.start()
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="models pull"):
            await backend.available()
    assert backend.ready() == "run: promptsluice models pull x" and backend.healthy()
    assert [card.id for card in await backend.models()] == ["x"]
    await backend.close()
