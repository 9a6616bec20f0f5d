"""The decorator on the gateway's own pipeline: real policies, real compressors, a real collection."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from promptsluice import optimize
from promptsluice.gateway.inprocess import Optimizer
from promptsluice.prompt import PromptsluiceError, Report

LOG = "\n\n".join(f"worker {n % 3}:   connection refused   by 10.0.0.7:5432" for n in range(60))
REPEATED: Any = [{"role": "user", "content": LOG}, {"role": "user", "content": "What is wrong?"}]


@pytest.fixture
def optimizer(tmp_path: Path) -> Iterator[Optimizer]:
    config = tmp_path / "policies.yaml"
    policies = "policies: {aggressive: {extends: aggressive, rewrite_timeout: 300}}"  # a busy machine takes its time
    root = f"collections: {{root: {tmp_path}/collections}}"
    config.write_text(f"version: 1\ndefault_policy: lossless\n{policies}\n{root}\n")
    with Optimizer(config) as optimizer:
        yield optimizer


def last_of(optimizer: Optimizer, policy: str | None, messages: Any, *, strict: bool = True) -> tuple[Any, Report]:
    """What a decorated function received, and the report."""
    reports: list[Report] = []

    @optimize(policy, config=optimizer, strict=strict, on_report=reports.append)
    def received(messages: Any) -> Any:
        return messages

    return received(messages), reports[0]


def test_lossless_takes_out_repeats(optimizer: Optimizer) -> None:
    messages, report = last_of(optimizer, None, REPEATED)
    assert report.policy == "lossless"
    assert len(messages[0]["content"]) < 0.6 * len(LOG)
    assert messages[1] is REPEATED[1]
    assert report.pruned > 0
    assert report.tokens_out == report.tokens_in - report.pruned


def test_off_gives_the_same_object(optimizer: Optimizer) -> None:
    messages, report = last_of(optimizer, "off", REPEATED)
    assert messages is REPEATED
    assert report.tokens_in == report.tokens_out > 0


@pytest.mark.slow
def test_a_step_that_fails_is_noted_and_strict_raises(optimizer: Optimizer) -> None:
    question = [{"role": "user", "content": "What is in the collection that nobody made?"}]
    messages, report = last_of(optimizer, "rag", question, strict=False)
    assert messages is question
    assert any(step.note.startswith("failed") for step in report.steps)
    with pytest.raises(PromptsluiceError, match="the policy rag was not carried out: retrieve: "):
        last_of(optimizer, "rag", question)


@pytest.mark.slow
def test_balanced_keeps_what_the_question_is_about(optimizer: Optimizer, minilm_dir: Path) -> None:
    filler = "The harvest of apples was good in the north, and the markets were full of people that autumn. "
    facts = "The backup server listens on port 7443 and accepts connections from the office only. "
    text = filler * 12 + facts + "".join(f"Week {n} was mild and dry. " for n in range(80))
    question = {"role": "user", "content": "Which port has the backup?"}
    messages, report = last_of(optimizer, "balanced", [{"role": "user", "content": text}, question])
    assert "port 7443" in messages[0]["content"]
    assert report.tokens_out < 0.8 * report.tokens_in


@pytest.mark.slow
def test_rag_retrieves_in_process(tmp_path: Path, optimizer: Optimizer, minilm_dir: Path) -> None:
    from promptsluice.rag import Collections, Document, SentenceEmbedder

    embedder = SentenceEmbedder(str(minilm_dir))
    docs = Collections(tmp_path / "collections", embedder=embedder, count_tokens=lambda text: len(text) // 4)
    docs.create("docs").add([Document(id="ports.md", text="The backup server listens on port 7443.")])
    messages, report = last_of(optimizer, "rag", [{"role": "user", "content": "Which port has the backup?"}])
    assert "port 7443" in messages[0]["content"]
    assert report.retrieved > 0


@pytest.mark.slow
def test_aggressive_scores_with_the_embedded_model(optimizer: Optimizer, smollm2_dir: Path, minilm_dir: Path) -> None:
    years = (f"In the year {1900 + n} the committee met again to talk about the same question." for n in range(60))
    text = " ".join(years)
    messages, report = last_of(optimizer, "aggressive", [{"role": "user", "content": text}, REPEATED[1]])
    assert any(step.name == "perplexity" and step.tokens_after < step.tokens_before for step in report.steps)
    assert len(messages[0]["content"]) < len(text)
