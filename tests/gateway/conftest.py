"""Fixtures of the gateway tests: one upstream and one gateway process for the whole session."""

from collections.abc import Iterator

import pytest

from .harness import UPSTREAM_KEY, Gateway, Upstream, start_gateway, stop_gateway

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
  dead: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [dead], timeouts: {{connect: 1}}}}
  lame:
    kind: openai
    base_url: http://127.0.0.1:9/v1
    models: [lame]
    fallbacks: [{{backend: far, model: far}}, {{backend: echo}}]
  lamer: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [lamer], fallbacks: [{{backend: far}}]}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv}}
"""


@pytest.fixture(scope="session")
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    yield server
    server.close()


@pytest.fixture(scope="session")
def gateway(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Echo and upstream backends; no model is loaded."""
    root = tmp_path_factory.mktemp("gateway")
    policy_file = root / "policy.yaml"
    policy_file.write_text(CONFIG.format(port=upstream.port, root=root))
    running = start_gateway(policy_file, log_level="debug", TEST_UPSTREAM_KEY=UPSTREAM_KEY)
    yield running
    stop_gateway(running)
