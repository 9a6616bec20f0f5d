"""OpenAI's client for Node (node/checks.mjs) against the gateway: a well-behaved upstream, and the embedded engine.

Skipped where node or the package is missing: npm install --prefix tests/gateway/node
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .harness import Gateway, eventually

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).with_name("node")


@pytest.fixture(scope="module", autouse=True)
def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules" / "openai").is_dir():
        pytest.skip("the npm package openai is not installed: npm install --prefix tests/gateway/node")
    return found


def check(node: str, gateway: Gateway, **settings: str) -> None:
    environ = {**os.environ, "BASE_URL": f"{gateway.url}/v1", **settings}
    command = [node, "--test", "--test-reporter", "spec", str(FOLDER / "checks.mjs")]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_on_an_upstream(node: str, mixed: Gateway) -> None:
    check(node, mixed, MODEL="far", EMBEDDER="lame", SCRIPTED="1")


def test_on_the_embedded_engine(node: str, mixed: Gateway, minilm_dir: Path) -> None:
    check(node, mixed, MODEL="tiny", EMBEDDER="all-minilm-l6-v2", FORCED="1")
    eventually(lambda: mixed.metric("vllm:num_requests_running") == 0)  # also of those who left
