"""LlamaIndex against the gateway, unchanged: its synthesizer stuffs documents into one message, and the gateway knows
them again in another order; streaming, tools and embeddings as it asks for them.

Skipped without its packages, which are large: pip install llama-index-core llama-index-llms-openai-like
llama-index-embeddings-openai
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Gateway, eventually, start_gateway, stop_gateway
from .test_langchain_reuse import CONFIG, MODEL, TOPICS, document

pytest.importorskip("llama_index.llms.openai_like", reason="the packages of LlamaIndex are not installed")
pytest.importorskip("llama_index.embeddings.openai", reason="the packages of LlamaIndex are not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # its own house is not ours to sweep
TOWN = "Lindholm"


@pytest.fixture(scope="module")
def recogniser(smollm2_dir: Path, minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("llamaindex")
    policy_file = root / "policy.yaml"
    policy_file.write_text(CONFIG.format(root=root, model=MODEL))
    running = start_gateway(policy_file, OMP_WAIT_POLICY="PASSIVE")
    yield running
    stop_gateway(running)


def model(gateway: Gateway, name: str = MODEL, **fields: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    options = {"is_chat_model": True, "temperature": 0, "max_tokens": 8, "context_window": 8192, **fields}
    return OpenAILike(model=name, api_base=f"{gateway.url}/v1", api_key="none", **options)


def ask(gateway: Gateway, topics: list[str], question: str) -> tuple[int, int]:
    """Prompt tokens and how many of them were cached, as the chat model's raw answer tells."""
    from llama_index.core.response_synthesizers import get_response_synthesizer
    from llama_index.core.schema import NodeWithScore, TextNode

    told: list[Any] = []

    class Listening(type(model(gateway))):
        def chat(self, *args: Any, **kwargs: Any) -> Any:
            told.append(super().chat(*args, **kwargs))
            return told[-1]

    llm = Listening(**model(gateway).model_dump() | {"api_key": "none"})
    synthesizer = get_response_synthesizer(llm=llm, response_mode="simple_summarize")
    nodes = [NodeWithScore(node=TextNode(text=document(topic, TOWN).page_content)) for topic in topics]
    assert str(synthesizer.synthesize(question, nodes=nodes))
    (answer,) = told
    usage = answer.raw.usage
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def test_the_second_question_over_documents_in_another_order_reuses_them(recogniser: Gateway) -> None:
    first, cached = ask(recogniser, ["harbour", "railway", "museum"], "How many piers are there?")
    assert cached < first / 4
    eventually(lambda: recogniser.metric('promptsluice_backend{backend="local",name="kv_jobs"}') == 0)
    second, cached = ask(recogniser, ["museum", "harbour", "railway"], "On which day is the museum closed?")
    assert abs(second - first) < 20 and cached > second / 2


def test_an_index_over_the_gateways_embeddings(recogniser: Gateway) -> None:
    """The whole stock chain: embed documents, find those of a question, ask the model, streamed."""
    from llama_index.core import Document, VectorStoreIndex
    from llama_index.embeddings.openai import OpenAIEmbedding

    embedder = OpenAIEmbedding(
        model_name="all-minilm-l6-v2", api_base=f"{recogniser.url}/v1", api_key="none", embed_batch_size=2
    )
    index = VectorStoreIndex.from_documents([Document(text=text) for text in TOPICS.values()], embed_model=embedder)
    engine = index.as_query_engine(llm=model(recogniser), similarity_top_k=1, streaming=True)
    answer: Any = engine.query("On which day is the museum of salt closed?")
    assert "Mondays" in answer.source_nodes[0].node.get_content()
    assert len([*answer.response_gen]) > 1


def test_tools(mixed: Gateway) -> None:
    from llama_index.core.tools import FunctionTool

    def report(city: str, degrees: int) -> str:
        """Report the weather of a city."""
        return f"{city}: {degrees}"

    tool = FunctionTool.from_defaults(fn=report)
    llm = model(mixed, "far", is_function_calling_model=True, max_tokens=100)
    answer = llm.predict_and_call([tool], user_msg="Report the weather of Oslo.")
    assert str(answer) == "Oslo: -3"
    chunks = [*llm.stream_chat_with_tools([tool], user_msg="Report the weather of Oslo.")]
    (call,) = llm.get_tool_calls_from_response(chunks[-1])
    assert call.tool_name == "report" and call.tool_kwargs == {"city": "Oslo", "degrees": -3}
