"""An engine's readings under vLLM's names: real requests on a tiny model, read back with a Prometheus parser."""

import math
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.loader import load_model
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.readings import Distribution
from promptsluice.backend_engine.service import EngineService
from promptsluice.backend_engine.types import GenerationRequest, SamplingParams
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.base import Answer, Call, Stream
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.engine_metrics import EngineCollector
from promptsluice.gateway.metrics import Metrics
from promptsluice.policies import PolicySet
from promptsluice.prompt import Overloaded

LABELS = {"model_name": "tiny", "engine": "local"}


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """By name and the label beside the common ones, if there is one."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items()
            other = [value for label, value in sample.labels.items() if label not in LABELS]
            found[sample.name, "".join(other)] = sample.value
    return found


def test_requests_show_under_vllms_names(tiny_llama_dir: Path) -> None:
    registry, collector = CollectorRegistry(), EngineCollector()
    registry.register(collector)
    service = EngineService(Engine(load_model(tiny_llama_dir), options=EngineOptions(pages=64)))
    service.start()
    for tokens in (5, 5, 0):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        service.run(GenerationRequest(ids=tuple(range(3, 43)), sampling=params))
    service.stop()
    collector.show({("tiny", "local"): service.readings()})
    found = samples(registry)
    assert found["vllm:num_requests_running", ""] == found["vllm:num_requests_waiting", ""] == 0
    assert found["vllm:kv_cache_usage_perc", ""] == 0
    assert found["vllm:prompt_tokens_total", ""] == found["vllm:prefix_cache_queries_total", ""] == 120
    assert found["vllm:prefix_cache_hits_total", ""] == 78
    assert found["vllm:generation_tokens_total", ""] == 10
    assert found["vllm:request_success_total", "length"] == 3
    assert found["vllm:time_to_first_token_seconds_count", ""] == 2
    assert found["vllm:inter_token_latency_seconds_count", ""] == 8
    assert (
        found["vllm:request_queue_time_seconds_count", ""] == found["vllm:e2e_request_latency_seconds_count", ""] == 3
    )
    assert found["vllm:e2e_request_latency_seconds_sum", ""] > found["vllm:time_to_first_token_seconds_sum", ""] > 0
    assert found["vllm:num_preemptions_total", ""] == 0
    drafted, accepted = (found[f"vllm:spec_decode_num_{kind}_tokens_total", ""] for kind in ("draft", "accepted"))
    assert drafted >= accepted >= 0


def test_a_distribution_counts_what_is_at_most_each_bound() -> None:
    distribution = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        distribution.add(value)
    assert distribution.cumulative() == (2, 3, 4) and math.isclose(distribution.total, 12.0)


def test_a_backend_that_is_gone_shows_no_gauges() -> None:
    metrics = Metrics()
    metrics.backends.show({"old": {"running": 3.0}, "kept": {"running": 1.0}})
    metrics.backends.show({"kept": {"running": 2.0}})
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("promptsluice_backend")]
    assert lines == ['promptsluice_backend{backend="kept",name="running"} 2.0']


class Hung(EchoBackend):
    """An engine that hangs, behind a full queue."""

    def healthy(self) -> bool:
        return False

    def ready(self) -> str | None:
        return "the engine hangs in a step"

    async def complete(self, call: Call) -> Answer | Stream:
        raise Overloaded("256 requests are waiting already", retry_after=7.2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hung_engine_and_a_full_queue_over_http(tmp_path: Path, stream: bool) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "version: 1\ndefault_policy: off\n"
        "backends: {echo: {kind: openai, base_url: 'http://127.0.0.1:9/v1', models: [m]}}\n"
        f"collections: {{root: {tmp_path}/c}}\nkv_cache: {{path: {tmp_path}/kv}}\n"
    )
    app = create_app(PolicySet.load(file), backends={"echo": Hung("echo", models=("m",))})
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/healthz")).status_code == 503
        ready = await client.get("/readyz")
        assert ready.status_code == 503 and "hangs" in ready.json()["reasons"]["echo"]
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "8"
        assert "x-should-retry" not in refused.headers, "SDKs retry a 503 by themselves"
        assert refused.json()["error"]["type"] == "overloaded_error"
