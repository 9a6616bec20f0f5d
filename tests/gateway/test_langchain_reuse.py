"""An unchanged LangChain client stuffs documents into its messages; the gateway knows them again in another order.

Nothing is set but the policy. On the real model: its chat template and its tokenizer decide what stands side by side.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from .harness import Gateway, eventually, start_gateway, stop_gateway

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m-instruct"
CONFIG = """
version: 1
default_policy: recognise
backends: {{local: {{kind: embedded, model: {model}, kv_memory: 512MiB, dtype: float32}}}}
kv_cache: {{path: {root}/kv, ram: 256MiB}}
policies:
  recognise: {{extends: off, reuse: {{mode: blend}}, allow_client_policy: [plain]}}
  plain: {{extends: off}}
"""
TOPICS = {
    "harbour": "The harbour of Valmy has three piers. The oldest one was built in 1843 from granite that came by ship.",
    "railway": "The railway from Valmy to the capital runs twice a day. A ticket costs nine crowns on board.",
    "museum": "The museum of salt is closed on Mondays. Its director, Anna Lindqvist, collects maps of the sea.",
}
SYSTEM = "Answer from the documents."
USER = "Use the following documents to answer the question.\n\n{context}\n\nQuestion: {question}\nAnswer briefly."


LAYOUTS: dict[str, list[tuple[str, str]]] = {
    "Valmy": [("system", SYSTEM), ("user", USER)],
    "Torsk": [("user", USER)],
    "Brennhavn": [("system", f"{SYSTEM}\n\n{{context}}"), ("user", "{question}")],
}
"""By the name of the town in the documents, so that no layout knows another one's."""


def document(topic: str, town: str) -> Document:
    """Three paragraphs, of which no two documents share one."""
    facts = TOPICS[topic].replace("Valmy", town)
    more = f"Visitors of {town} who ask about the {topic} are told this first; it is written down in a large book. "
    last = f"What else is known about the {topic} of {town} was lost in 1911, when the archive burned to the ground. "
    return Document(page_content="\n\n".join([facts * 2, more * 3, last * 3]))


@pytest.fixture(scope="module")
def gateway(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("langchain")
    policy_file = root / "policy.yaml"
    policy_file.write_text(CONFIG.format(root=root, model=MODEL))
    running = start_gateway(policy_file, OMP_WAIT_POLICY="PASSIVE")
    yield running
    stop_gateway(running)


def ask(gateway: Gateway, town: str, topics: Sequence[str], question: str, *, key: str = "none") -> UsageMetadata:
    """The usual chain: documents into a prompt, the prompt to a chat model; what it says about its tokens."""
    model = ChatOpenAI(
        model=MODEL, base_url=f"{gateway.url}/v1", api_key=SecretStr(key), temperature=0, max_completion_tokens=8
    )
    chain = ChatPromptTemplate.from_messages(LAYOUTS[town]) | model
    context = "\n\n".join(document(topic, town).page_content for topic in topics)
    answer = chain.invoke({"context": context, "question": question})
    assert isinstance(answer, AIMessage) and answer.usage_metadata is not None
    return answer.usage_metadata


def cached(usage: UsageMetadata) -> int:
    return usage.get("input_token_details", {}).get("cache_read", 0)


@pytest.mark.parametrize("town", LAYOUTS)
def test_the_second_question_over_documents_in_another_order_reuses_them(gateway: Gateway, town: str) -> None:
    def computed() -> bool:
        return gateway.metric('promptsluice_backend{backend="local",name="kv_jobs"}') == 0

    first = ask(gateway, town, ["harbour", "railway", "museum"], "How many piers are there?")
    assert cached(first) < first["input_tokens"] / 4
    eventually(computed)  # what was not known, in the background
    second = ask(gateway, town, ["museum", "harbour", "railway"], "On which day is the museum closed?")
    assert abs(second["input_tokens"] - first["input_tokens"]) < 20
    assert cached(second) > second["input_tokens"] / 2
    fewer = ask(gateway, town, ["railway", "harbour"], "What does a ticket cost?")
    assert cached(fewer) > fewer["input_tokens"] / 2
    stranger = ask(gateway, town, ["railway", "harbour"], "What does a ticket cost?", key=f"somebody in {town}")
    assert cached(stranger) == 0


def test_a_follow_up_turn_goes_on_from_the_blended_prompt(gateway: Gateway) -> None:
    """The documents stand in the first turn, blended; the second turn computes itself."""

    def asked(turns: list[dict[str, str]], policy: str = "recognise") -> httpx.Response:
        body = {"model": f"{MODEL}:{policy}", "messages": turns, "max_tokens": 8, "temperature": 0}
        response = gateway.post(body, authorization="Bearer talker")
        assert response.status_code == 200, response.text
        return response

    def stuffed(topics: Sequence[str], question: str) -> dict[str, str]:
        context = "\n\n".join(document(topic, "Talkby").page_content for topic in topics)
        return {"role": "user", "content": USER.format(context=context, question=question)}

    asked([stuffed(["harbour", "railway", "museum"], "How many piers are there?")])
    eventually(lambda: gateway.metric('promptsluice_backend{backend="local",name="kv_jobs"}') == 0)
    first = stuffed(["museum", "harbour", "railway"], "On which day is the museum closed?")
    blended = asked([first])
    assert blended.headers["x-promptsluice-steps"] == "blend"
    assert int(blended.headers["x-promptsluice-tokens-blended"]) == 0
    turns = [first, blended.json()["choices"][0]["message"], {"role": "user", "content": "Who is its director?"}]
    second = asked(turns)
    assert second.headers["x-promptsluice-steps"] == "kept"
    kept, cached = (int(second.headers[f"x-promptsluice-tokens-{name}"]) for name in ("blended", "cached"))
    prompt = blended.json()["usage"]["prompt_tokens"]
    assert 0.8 * prompt < kept <= cached and cached > prompt - 16
    assert second.headers["x-promptsluice-kv-tiers"].startswith("kept=")
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    plain = asked(turns, "plain")
    assert int(plain.headers["x-promptsluice-tokens-blended"]) == 0
    assert int(plain.headers["x-promptsluice-tokens-cached"]) < prompt / 4
