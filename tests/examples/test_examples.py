"""Each example runs as its own process against a real gateway that echoes the question."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.policies import PolicySet

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    """The URL of a gateway whose only backend is the echo."""
    app = create_app(PolicySet.default(), backends={"local": EchoBackend("local", models=[MODEL])})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()


def output_of(example: str, *arguments: str, gateway: str) -> str:
    environment = os.environ | {"OPENAI_BASE_URL": gateway, "OPENAI_API_KEY": "none", "MODEL": MODEL}
    run = subprocess.run(
        [sys.executable, EXAMPLES / example, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "not optimized" not in run.stderr
    return run.stdout


def figures(line: str) -> tuple[int, int]:
    """(before, after) of a line `tokens before: 12, after: 7`."""
    numbers = [int(word.strip(",")) for word in line.split() if word.strip(",").isdigit()]
    return numbers[0], numbers[1]


@pytest.mark.slow
def test_the_openai_client(gateway: str) -> None:
    answer, _, rest = output_of("openai_client.py", "what", "is", "this?", gateway=gateway).partition("\n\n")
    assert answer == "what is this?"
    assert "prompt tokens: " in rest
    assert "policy: lossless" in rest


@pytest.mark.slow
def test_the_decorated_function(gateway: str) -> None:
    report, answer = output_of("optimize_function.py", gateway=gateway).splitlines()
    before, after = figures(report)
    assert after < before
    assert answer == "What is wrong?"


@pytest.mark.slow
def test_the_wrapped_client(gateway: str) -> None:
    lines = output_of("wrap_client.py", gateway=gateway).splitlines()
    assert {line for line in lines if "?" in line} == {f"{q} {q}" for q in ("What is wrong?", "Which port is it?")}
    reports = [figures(line) for line in lines if line.startswith("tokens")]
    assert len(reports) == 2
    assert all(after < before for before, after in reports)


@pytest.mark.slow
def test_langchain(gateway: str) -> None:
    lines = output_of("langchain_rag.py", gateway=gateway).splitlines()
    assert lines[0] == "How many piers are there? Question: How many piers are there?"
    reports = [figures(line) for line in lines if line.startswith("prompt tokens")]
    assert len(reports) == 2 and all(prompt > 300 and cached == 0 for prompt, cached in reports)


@pytest.mark.slow
def test_llamaindex(gateway: str, minilm_dir: Path) -> None:
    pytest.importorskip("llama_index.llms.openai_like", reason="the packages of LlamaIndex are not installed")
    answer = output_of("llamaindex_rag.py", "When", "is", "the", "museum", "closed?", gateway=gateway)
    assert answer.startswith("Query: When is the museum closed?")


def test_every_example_is_tried() -> None:
    tried = Path(__file__).read_text()
    assert all(f'"{path.name}"' in tried for path in EXAMPLES.glob("*.py"))
