"""The demo's parts without an engine: pages, messages, figures, tables, and a server process that is always stopped."""

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from promptsluice.gateway.cli import demo_docs
from promptsluice.gateway.cli.demo_ask import asked_from, messages_for
from promptsluice.gateway.cli.demo_server import free_port, running_gateway, stop
from promptsluice.gateway.cli.demo_table import Asked, as_json, medians, shortened, show
from promptsluice.prompt import PromptsluiceError, Report
from rich.console import Console


def row(policy: str, question: str, ttft_ms: float, answer: str = "An answer.") -> Asked:
    return Asked(
        policy=policy, question=question, answer=answer, tokens_in=100, tokens_out=80, cached=3, reused=50,
        recomputed=8, pruned=20, ttft_ms=ttft_ms, total_ms=ttft_ms + 5,
    )  # fmt: skip


ROWS = [row("off", "a?", 10), row("off", "b?", 30), row("rag", "a?", 1), row("rag", "b?", 4, "Long. " * 40)]


def test_medians_by_policy_in_the_order_asked() -> None:
    found = medians(ROWS)
    assert list(found) == ["off", "rag"]
    assert found["off"]["TTFT ms"] == 20
    assert found["rag"]["TTFT ms"] == 2.5
    assert found["rag"]["reused"] == 50


@pytest.mark.parametrize("width", [80, 200])
def test_tables_show_every_row_and_figure(width: int) -> None:
    shown = io.StringIO()
    show(ROWS, Console(width=width, file=shown, force_terminal=True, color_system=None))
    text = shown.getvalue()
    assert text.count("a?") == text.count("b?") == 1
    assert text.count("off ") == text.count("rag ") == 3
    assert all(name in text for name in ("in", "out", "cached", "reused", "recomp.", "pruned", "TTFT ms", "answer"))
    assert text.count("An answer.") == 3
    assert max(len(line) for line in text.splitlines()) <= width


def test_long_answers_are_cut_to_one_line() -> None:
    assert shortened("a\n b", 72) == "a b"
    assert shortened("word " * 100, 12) == "word word w…"
    assert shortened("word", 0) == ""


def test_json_has_all_figures() -> None:
    data = as_json(ROWS, about={"model": "m"})
    assert data["about"] == {"model": "m"}
    assert len(data["answers"]) == 4
    assert data["answers"][0]["ttft_ms"] == 10


def test_a_row_comes_from_the_report_and_no_other_policy_is_taken_for_it() -> None:
    report = Report(policy="off", tokens_in=7, tokens_out=6, pruned=1).to_wire()
    assert asked_from(report, policy="off", question="q", answer="", ttft_ms=1, total_ms=2).tokens_in == 7
    with pytest.raises(PromptsluiceError, match="asked for the policy 'rag'"):
        asked_from(report, policy="rag", question="q", answer="", ttft_ms=1, total_ms=2)
    with pytest.raises(PromptsluiceError, match="asked for the policy 'rag'"):
        asked_from({}, policy="rag", question="q", answer="", ttft_ms=1, total_ms=2)


def test_the_question_is_the_last_message_and_passages_come_before() -> None:
    assert messages_for("q", []) == [{"role": "user", "content": "q"}]
    first, last = messages_for("q", ["one", "two"])
    assert last == {"role": "user", "content": "q"}
    assert "one" in first["content"]
    assert "two" in first["content"]


def test_pages_are_the_english_part_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.png").write_bytes(b"\x89")
    assert [page.id for page in demo_docs.pages_of(tmp_path)] == ["a.txt", "b.md"]
    (tmp_path / "en" / "sub").mkdir(parents=True)
    (tmp_path / "en" / "sub" / "d.md").write_text("three")
    assert [(page.id, page.text) for page in demo_docs.pages_of(tmp_path)] == [("sub/d.md", "three")]


def test_a_folder_without_pages_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PromptsluiceError, match="no Markdown or text files"):
        demo_docs.pages_of(tmp_path)


def test_the_shipped_documents_and_questions() -> None:
    assert len(demo_docs.questions_of(demo_docs.QUESTIONS)) == 10
    assert len(demo_docs.pages_of(demo_docs.DOCS)) >= 5


@pytest.mark.slow
def test_a_gateway_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = tmp_path / "policies.yaml"
    config.write_text("version: 2\n")
    with (
        pytest.raises(PromptsluiceError, match=r"ended with code 1:\n.*policies.yaml:1"),
        running_gateway(config, log=tmp_path / "log"),
    ):
        pass


def test_a_server_that_does_not_listen_to_signals_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stop(process, wait_s=0.1)
        assert process.returncode == -signal.SIGKILL


def test_a_signal_to_end_cleans_up(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from promptsluice.gateway.cli.demo_server import ended_in_order
with ended_in_order():
    try:
        print("on", flush=True)
        time.sleep(60)
    finally:
        Path({str(tmp_path)!r}, "cleaned").touch()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert (tmp_path / "cleaned").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_free_ports_are_free() -> None:
    assert 1024 <= free_port() <= 65535
