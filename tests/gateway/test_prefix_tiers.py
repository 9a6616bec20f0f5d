"""The prefix cache's tiers from a policy file to usage, report and metrics."""

from pathlib import Path

import pytest
from promptsluice.gateway.backends.engine_room import engine_options
from promptsluice.policies import PolicySet
from promptsluice.policies.schema import EmbeddedBackend

from .harness import eventually, start_gateway, stop_gateway

MODEL = "smollm2-135m-instruct"
CONFIG = """
version: 1
default_policy: off
backends:
  local:
    {{kind: embedded, model: {model}, kv_memory: 24MiB, dtype: float32, prefix_cache: {{disk: {{path: prefixes}}}}}}
"""


def backend(text: str) -> EmbeddedBackend:
    spec = PolicySet.from_text(f"version: 1\nbackends: {{local: {{kind: embedded, {text}}}}}").backends["local"]
    assert isinstance(spec, EmbeddedBackend)
    return spec


def test_what_a_backend_asks_for_is_what_the_engine_gets(tmp_path: Path) -> None:
    plain = backend("kv_memory: 1GiB")
    assert engine_options(plain, on_card=False, prefixes=None).host_bytes == 0
    assert engine_options(plain, on_card=True, prefixes=None).host_bytes == 4 << 30
    assert engine_options(plain, on_card=False, prefixes=None).kv_dtype == "auto"
    assert engine_options(backend("kv_dtype: int8"), on_card=False, prefixes=None).kv_dtype == "int8"
    sized = backend("prefix_cache: {host: 1GiB, disk: {path: x, size: 2GiB}}")
    options = engine_options(sized, on_card=False, prefixes=tmp_path)
    assert (options.host_bytes, options.disk_bytes, options.disk_path) == (1 << 30, 2 << 30, tmp_path)
    through = engine_options(backend("prefix_cache: {disk: {}}"), on_card=False, prefixes=tmp_path)
    assert (through.host_bytes, through.disk_bytes) == (256 << 20, 16 << 30)
    off = engine_options(backend("prefix_cache: {host: 0}"), on_card=True, prefixes=None)
    assert (off.host_bytes, off.disk_bytes) == (0, 0)


@pytest.mark.slow
def test_a_conversation_that_another_one_pushed_out_comes_back(smollm2_dir: Path, tmp_path: Path) -> None:
    """Memory holds one and a half of two conversations."""
    policy_file = tmp_path / "policy.yaml"
    policy_file.write_text(CONFIG.format(model=MODEL))
    first = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    first["messages"] = [{"role": "user", "content": "Say something about " + "rivers and hills and " * 75}]
    second = first | {"messages": [{"role": "user", "content": "Tell me what is " + "up and down and near " * 75}]}
    name = 'promptsluice_backend{{backend="local",name="{}"}}'.format

    gateway = start_gateway(policy_file, OMP_WAIT_POLICY="PASSIVE")
    try:
        computed = gateway.post(first).json()
        gateway.post(second)
        again = gateway.post(first, **{"x-promptsluice-report": "1"}).json()
        loaded = again["promptsluice"]["loaded"]
        assert again["choices"][0]["message"] == computed["choices"][0]["message"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= loaded >= 64
        assert gateway.metric(name("host_loaded_pages")) == loaded / 16
        eventually(lambda: gateway.metric(name("disk_written_pages")) == gateway.metric(name("host_saved_pages")))
    finally:
        stop_gateway(gateway)
    assert list((tmp_path / "prefixes").rglob("*.page"))
