"""Asking the demo's questions through the official OpenAI SDK, streaming, and keeping the figures of each answer."""

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...prompt import PromptsluiceError
from .demo_table import Asked

if TYPE_CHECKING:
    from openai import OpenAI

_ANSWER_TOKENS = 64
_COUNTS = ("tokens_in", "tokens_out", "cached", "reused", "recomputed", "pruned")


def require_sdk() -> None:
    """PromptsluiceError says what to install where there is no SDK."""
    if find_spec("openai") is None:
        raise PromptsluiceError("the demo needs the OpenAI SDK; run: pip install 'promptsluice[client]'")


def connect(base_url: str, *, api_key: str) -> "OpenAI":
    """An SDK client for the gateway. Different keys do not share the prefix cache."""
    from openai import OpenAI

    return OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0, timeout=300)


def messages_for(question: str, passages: Sequence[str]) -> list[dict[str, str]]:
    """What a client sends: the question alone, or after a message with the passages that it looked up itself."""
    asked = {"role": "user", "content": question}
    if not passages:
        return [asked]
    return [{"role": "user", "content": "\n\n".join(("Use these passages:", *passages))}, asked]


def ask(client: "OpenAI", model: str, policy: str, question: str, passages: Sequence[str]) -> Asked:
    """Ask once, greedily, under a policy that the model's suffix names."""
    from openai import OpenAIError

    try:
        return _ask(client, model, policy, question, passages)
    except OpenAIError as error:
        raise PromptsluiceError(f"the gateway did not answer under the policy {policy}: {error}") from error


def _ask(client: "OpenAI", model: str, policy: str, question: str, passages: Sequence[str]) -> Asked:
    began = time.perf_counter()
    first: float | None = None
    answer: list[str] = []
    report: Mapping[str, Any] = {}
    messages: Any = messages_for(question, passages)
    with client.chat.completions.create(
        model=f"{model}:{policy}", messages=messages, temperature=0, max_tokens=_ANSWER_TOKENS, stream=True,
        extra_headers={"x-promptsluice-report": "1"},
    ) as stream:  # fmt: skip
        for chunk in stream:
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first = first or time.perf_counter()
                answer.append(text)
            report = (chunk.model_extra or {}).get("promptsluice") or report
    ended = time.perf_counter()
    return asked_from(
        report, policy=policy, question=question, answer="".join(answer),
        ttft_ms=((first or ended) - began) * 1000, total_ms=(ended - began) * 1000,
    )  # fmt: skip


def asked_from(
    report: Mapping[str, Any], *, policy: str, question: str, answer: str, ttft_ms: float, total_ms: float
) -> Asked:
    """One row from the report that came with the answer."""
    if report.get("policy") != policy:
        raise PromptsluiceError(f"asked for the policy {policy!r} but the gateway reports {report.get('policy')!r}")
    counts = {name: int(report[name]) for name in _COUNTS}
    return Asked(policy=policy, question=question, answer=answer, ttft_ms=ttft_ms, total_ms=total_ms, **counts)
