"""`serve` and `demo` as real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from promptsluice.gateway.cli.demo_server import free_port, running_gateway

UPSTREAM = "version: 1\nbackends: {up: {kind: openai, base_url: 'http://127.0.0.1:9/v1', models: [m]}}\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gateway that only forwards: it needs no model, and there is none in its cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "policies.yaml"
    file.write_text(UPSTREAM)
    return file


@pytest.mark.slow
def test_a_server_runs_for_the_length_of_a_block(config: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_gateway(config, log=log) as base_url:
        assert httpx.get(f"{base_url}/healthz", trust_env=False).status_code == 200
        names = [model["id"] for model in httpx.get(f"{base_url}/v1/models", trust_env=False).json()["data"]]
        assert "m" in names
    assert "warning: no retrieval and no pruning by meaning" in log.read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", urlsplit(base_url).port)) != 0, "somebody still listens"


@pytest.mark.slow
def test_a_server_is_stopped_when_the_block_fails(config: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_gateway(config, log=tmp_path / "log") as base_url:
        raise KeyboardInterrupt
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{base_url}/healthz", trust_env=False)


@pytest.mark.slow
def test_ctrl_c_ends_serve_without_a_traceback(config: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "promptsluice", "serve", "--config", str(config), "--offline", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        started = next(line for line in server.stdout if "running on" in line)
        assert str(port) in started
        server.send_signal(signal.SIGINT)
        rest = server.stdout.read()
    assert server.returncode in (0, 130, -signal.SIGINT)
    assert "Traceback" not in rest


@pytest.mark.slow
def test_a_busy_port_is_an_error_that_ends(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = subprocess.run(
            [sys.executable, "-m", "promptsluice", "serve", "--config", str(config), "--offline", "--port", port],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert run.returncode != 0
    assert "address already in use" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_the_demo_on_three_pages_and_one_question(tmp_path: Path, smollm2_dir: Path, minilm_dir: Path) -> None:
    docs = tmp_path / "docs" / "en"
    docs.mkdir(parents=True)
    pages = {
        "ports": ("The backup server listens on port 7443.", "the weather in the harbour was calm and the ships left"),
        "apples": ("Apples are harvested in autumn.", "the trees of the orchard were cut by hand before the frost"),
        "about": ("This documentation is about a small island.", "the ferry came late and brought the mail and bread"),
    }
    for name, (fact, weekly) in pages.items():  # the question finds them in another order than the one before it did
        weeks = "".join(f"In week {n} {weekly} in time. " for n in range(14))
        (docs / f"{name}.md").write_text(f"# {name.title()}\n\n{fact}\n\n{weeks}")
    questions = tmp_path / "questions.yaml"
    questions.write_text("- Which port does the backup server listen on?\n")
    figures = tmp_path / "figures.json"
    options = ("--docs", docs.parent, "--questions", questions, "--json", figures)
    run = subprocess.run(
        [sys.executable, "-m", "promptsluice", "demo", *options],
        capture_output=True, text=True, timeout=600, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "median" in run.stdout
    rows = {row["policy"]: row for row in json.loads(figures.read_text())["answers"]}
    assert list(rows) == ["off", "balanced", "rag"]
    assert all(row["answer"] for row in rows.values())
    assert all(0 < row["ttft_ms"] <= row["total_ms"] for row in rows.values())
    assert rows["off"]["tokens_in"] == rows["off"]["tokens_out"]
    assert rows["off"]["pruned"] == rows["off"]["reused"] == 0, "and each policy has its own cache"
    assert rows["balanced"]["tokens_in"] == rows["off"]["tokens_in"]
    assert rows["rag"]["tokens_in"] < rows["off"]["tokens_in"] / 4, "only the question was sent"
    assert rows["rag"]["reused"] > 0, "the chunks' KV was there"
    assert rows["rag"]["recomputed"] > 0, "and some of it was repaired"
    assert not list(tmp_path.glob("promptsluice-demo-*")), "its data is gone"
