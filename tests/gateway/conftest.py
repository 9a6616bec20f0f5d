"""Fixtures of the gateway tests: one upstream and one gateway process a session, and one on the real model."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest

from .harness import PATIENCE_S, UPSTREAM_KEY, Gateway, Upstream, start_gateway, stop_gateway
from .provider import provide

if TYPE_CHECKING:
    import anthropic

CONFIG = """
version: 1
default_policy: off
server: {{max_body_bytes: 6MiB, drain_timeout: 10}}
backends:
  echo: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo, org/echo]}}
  echo-slow: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [slow]}}
  echo-gated: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [gated]}}
  far:
    kind: openai
    base_url: http://127.0.0.1:{port}/v1
    api_key_env: TEST_UPSTREAM_KEY
    models: [far, org/far]
    timeouts: {{connect: 2, read: 5}}
    breaker: {{failures: 0}}
  hushed:
    kind: openai
    base_url: http://127.0.0.1:{port}/v1
    models: [hushed]
    timeouts: {{read: 0.5}}
    breaker: {{failures: 0}}
  dead:
    kind: openai
    base_url: http://127.0.0.1:9/v1
    models: [dead]
    timeouts: {{connect: 1}}
    breaker: {{failures: 0}}
  lame:
    kind: openai
    base_url: http://127.0.0.1:9/v1
    models: [lame]
    breaker: {{failures: 0}}
    fallbacks: [{{backend: far, model: far}}, {{backend: echo}}]
  lamer:
    kind: openai
    base_url: http://127.0.0.1:9/v1
    models: [lamer]
    breaker: {{failures: 0}}
    fallbacks: [{{backend: far}}]
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv}}
policies:
  off: {{extends: off, allow_client_policy: all}}
  cached: {{extends: off, cache: {{ttl: 600}}}}
  patient: {{extends: lossless, token_value_ms: 99, rewrite_timeout: 30}}
  keen: {{extends: aggressive, token_value_ms: 99, rewrite_timeout: 30}}
  hasty: {{extends: off, compress: [{{use: extractive}}], token_value_ms: 99, rewrite_timeout: 0.000001}}
  alike: {{extends: off, cache: {{similarity: 0.9}}}}
  alike-too: {{extends: off, cache: {{similarity: 0.91}}}}
"""
MIXED_CONFIG = """
version: 1
default_policy: off
backends:
  echo: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [echo]}}
  tiny: {{kind: embedded, model: {root}/tiny, kv_memory: 16MiB, threads: 1}}
  far:
    kind: openai
    base_url: http://127.0.0.1:{port}/v1
    models: [far]
    breaker: {{failures: 0}}
  lame:
    kind: openai
    base_url: http://127.0.0.1:9/v1
    models: [lame]
    breaker: {{failures: 0}}
    fallbacks: [{{backend: far, model: far}}]
  dead: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [dead], breaker: {{failures: 0}}}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv, ram: 1MiB, disk: 0}}
"""
# Lays out all that clients send; the comment is what its dialect of tool calls is recognised by.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{# <tool_call> #}"
)
MODEL = "smollm2-135m-instruct"
ENGINE_CONFIG = """
version: 1
default_policy: off
backends: {{local: {{kind: embedded, model: {model}, kv_memory: 512MiB, dtype: float32, queue: 8, queue_tokens: 3000}}}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv, ram: 64MiB}}
policies:
  off: {{extends: off, allow_client_policy: all}}
  uncached: {{extends: off, reuse: {{mode: off}}}}
  whole: {{extends: recall, reuse: {{mode: off}}}}
  repaired: {{extends: recall, reuse: {{mode: blend, ratio: 1.0}}}}
  pruned: {{extends: balanced, rewrite_timeout: 120}}
  shrunk: {{extends: aggressive, rewrite_timeout: 120}}
  poisoned: {{extends: rag, retrieve: {{collection: poison}}}}
  recall: {{extends: rag, retrieve: {{collection: handbook, top_k: 3}}, reuse: {{min_chunk_tokens: 32}}}}
"""


@pytest.fixture(scope="session")
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    yield server
    server.close()


@pytest.fixture(scope="session")
def claude(gateway: Gateway) -> "Iterator[anthropic.Anthropic]":
    """Anthropic's client of the gateway."""
    import anthropic

    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def gateway(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Echo and upstream backends; no model is loaded."""
    root = tmp_path_factory.mktemp("gateway")
    policy_file = root / "policy.yaml"
    policy_file.write_text(CONFIG.format(port=upstream.port, root=root))
    running = start_gateway(policy_file, log_level="debug", TEST_UPSTREAM_KEY=UPSTREAM_KEY)
    yield running
    stop_gateway(running)


@pytest.fixture(scope="session")
def provider() -> Iterator[Upstream]:
    """An upstream that behaves well."""
    server = Upstream()
    server.answer(provide)
    yield server
    server.close()


@pytest.fixture(scope="session")
def mixed(
    provider: Upstream, tiny_model: Callable[..., Path], smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """What clients meet: an echo, a well-behaved upstream, and the embedded engine on random weights with a real
    tokenizer and tools.
    """
    root = tmp_path_factory.mktemp("mixed")
    weights = tiny_model("Llama", vocab_size=49_160, hidden_size=48, num_hidden_layers=1, tie_word_embeddings=True)
    shutil.copytree(weights, root / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, root / "tiny")
    (root / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    policy_file = root / "policy.yaml"
    policy_file.write_text(MIXED_CONFIG.format(port=provider.port, root=root))
    running = start_gateway(policy_file, OMP_WAIT_POLICY="PASSIVE")
    yield running
    stop_gateway(running)


@pytest.fixture(scope="session")
def engine(smollm2_dir: Path, minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The embedded backend on the real model in float32, and the real embedder."""
    root = tmp_path_factory.mktemp("engine")
    policy_file = root / "policy.yaml"
    policy_file.write_text(ENGINE_CONFIG.format(root=root, model=MODEL))
    running = start_gateway(policy_file, OMP_WAIT_POLICY="PASSIVE")
    yield running
    stop_gateway(running)


@pytest.fixture
def client(engine: Gateway) -> Iterator[openai.OpenAI]:
    """The OpenAI SDK on the real model."""
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as sdk:
        yield sdk
