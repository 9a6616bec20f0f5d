"""A real engine with more requests than it takes: some are answered, the others are told when to come back."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .harness import eventually, http, start_gateway, stop_gateway

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m-instruct"
CONFIG = """
version: 1
default_policy: off
backends:
  local: {{kind: embedded, model: {model}, kv_memory: 256MiB, dtype: float32, max_running: 1, queue: 1}}
collections: {{root: {root}/collections}}
kv_cache: {{path: {root}/kv, ram: 16MiB}}
"""


def test_a_full_queue_is_a_503_with_a_time_to_retry(smollm2_dir: Path, tmp_path: Path) -> None:
    policy_file = tmp_path / "policy.yaml"
    policy_file.write_text(CONFIG.format(root=tmp_path, model=MODEL))
    gateway = start_gateway(policy_file, OMP_WAIT_POLICY="PASSIVE")
    labels = f'{{engine="local",model_name="{MODEL}"}}'

    def body(**fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, **fields}

    def ask() -> httpx.Response:
        return gateway.post(body(max_tokens=4))

    # One that runs for as long as its client stays.
    endless = body(stream=True, ignore_eos=True)
    try:
        with ThreadPoolExecutor(1) as callers:
            with http.stream("POST", f"{gateway.url}/v1/chat/completions", json=endless):
                eventually(lambda: gateway.metric(f"vllm:num_requests_running{labels}") == 1)
                waiting = callers.submit(ask)
                eventually(lambda: gateway.metric(f"vllm:num_requests_waiting{labels}") == 1)
                assert gateway.metric(f"vllm:kv_cache_usage_perc{labels}") > 0
                refused = ask()
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "x-should-retry" not in refused.headers and refused.json()["error"]["code"] == "overloaded"
            assert waiting.result().status_code == 200
        assert ask().status_code == 200
        assert http.get(f"{gateway.url}/readyz").status_code == 200
    finally:
        stop_gateway(gateway)
