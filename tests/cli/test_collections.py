"""`collections` and `kv` on a real embedder, and on a real engine where KV is computed."""

from pathlib import Path

import pytest
from promptsluice.gateway.cli import app
from promptsluice.kv_reuse.gate import Bounds, Gate, Sample, gate_file
from typer.testing import CliRunner, Result


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A policy file whose data lies below the test's folder."""
    file = tmp_path / "policies.yaml"
    file.write_text(
        "version: 1\n"
        "backends: {local: {kind: embedded, model: smollm2-135m-instruct, kv_memory: 64MiB}}\n"
        f"collections: {{root: {tmp_path}/collections}}\n"
        f"kv_cache: {{disk: 64MiB, path: {tmp_path}/kv}}\n"
    )
    return file


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Two documents of which one is long enough for its KV to be worth keeping."""
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "ports.md").write_text("# Ports\n\n" + "The backup server listens on port 7443 in the office. " * 6)
    (folder / "deep" / "apples.txt").write_text("Apples are harvested in autumn.")
    return folder


def run(*arguments: str | Path, config: Path, fails: bool = False, answer: str | None = None) -> Result:
    result = CliRunner().invoke(app, [*map(str, arguments), "--config", str(config)], input=answer)
    assert (result.exit_code == 1) == fails, result.output + result.stderr
    return result


def test_nothing_to_list(config: Path) -> None:
    assert "collection" in run("collections", "list", config=config).stdout


def test_a_collection_that_is_not_there(config: Path) -> None:
    result = run("collections", "delete", "nothing", "--yes", config=config, fails=True)
    assert result.stderr == "error: there is no collection 'nothing'\n"


def test_status_of_an_empty_store(config: Path, tmp_path: Path) -> None:
    shown = run("kv", "status", config=config).stdout
    assert f"folder: {tmp_path}/kv" in shown
    assert "64.0 MiB" in shown
    assert "0%" in shown


def test_status_shows_what_blends_were_seen_to_lose(config: Path, tmp_path: Path) -> None:
    gate = Gate(gate_file(tmp_path / "kv", "0123456789abcdef"))
    for kl in (0.1, 0.3):
        gate.record("docs", Sample(0.15, kl, 0.75), Bounds(1.0, 0.25, 0.0))
    gate.record("few", Sample(0.15, 0.5, 0.25), Bounds(1.0, 0.25, 0.0))
    few, row = sorted(run("kv", "status", config=config).stdout.splitlines()[-2:], key=lambda line: "docs" in line)
    assert row.split()[:5] == ["01234567", "docs", "2", "0.200", "±"]
    assert row.split()[6:] == ["0.750", "±", "0.000", "by", "policy"]
    assert few.split()[1:] == ["few", "1", "0.500,", "once", "0.250,", "once", "by", "policy"]


def test_status_tells_apart_how_chunks_are_kept(config: Path, tmp_path: Path) -> None:
    for kind in ("", "-chunks-int8"):
        gate = Gate(gate_file(tmp_path / "kv", f"0123456789abcdef01{kind}"))
        gate.record("docs", Sample(0.15, 0.5, 0.25), Bounds(1.0, 0.25, 0.0))
    rows = [line.split()[:3] for line in run("kv", "status", config=config).stdout.splitlines()[-2:]]
    assert sorted(rows) == [["01234567", "docs", "1"], ["01234567-chunks-int8", "docs", "1"]]


def test_status_without_a_disk_tier(tmp_path: Path) -> None:
    file = tmp_path / "ram.yaml"
    file.write_text("version: 1\nkv_cache: {disk: 0}\n")
    assert "keeps no KV on disk" in run("kv", "status", config=file, fails=True).stderr


@pytest.mark.slow
def test_ingest_list_search_delete(config: Path, docs: Path, minilm_dir: Path, smollm2_dir: Path) -> None:
    first = run("collections", "ingest", docs, "--collection", "mine", "--no-warm", config=config)
    assert "mine: 2 added, 0 replaced, 0 unchanged; 2 new chunks" in first.stderr
    (docs / "deep" / "apples.txt").write_text("Apples are harvested in October.")
    again = run("collections", "ingest", docs, "--collection", "mine", "--no-warm", config=config)
    assert "mine: 0 added, 1 replaced, 1 unchanged; 1 new chunks" in again.stderr
    listed = run("collections", "list", config=config).stdout.splitlines()[-1].split()
    assert listed[:3] == ["mine", "2", "2"]
    found = run("collections", "search", "mine", "Which port has the backup server?", "-k", "1", config=config).stdout
    assert "ports.md#0" in found
    assert "port 7443" in found
    assert "2 documents, 2 chunks embedded anew" in run("collections", "reembed", "mine", config=config).stderr
    run("collections", "delete", "mine", "--document", "ports.md", "--yes", config=config)
    assert run("collections", "list", config=config).stdout.splitlines()[-1].split()[:2] == ["mine", "1"]
    run("collections", "delete", "mine", config=config, answer="n\n", fails=True)
    run("collections", "delete", "mine", config=config, answer="y\n")
    assert "mine" not in run("collections", "list", config=config).stdout


@pytest.mark.slow
def test_kv_is_computed_once_and_kept(config: Path, docs: Path, minilm_dir: Path, smollm2_dir: Path) -> None:
    first = run("collections", "ingest", docs, config=config)
    assert "local: 1 computed, 0 there before, 1 too short or too long, 0 refused" in first.stderr
    again = run("kv", "warm", "docs", config=config)
    assert "local: 0 computed, 1 there before, 1 too short or too long, 0 refused" in again.stderr
    row = run("kv", "status", config=config).stdout.splitlines()[-1].split()
    assert row[:2] == ["disk", "1"]
    run("collections", "delete", "docs", "--yes", config=config)
    row = run("kv", "status", config=config).stdout.splitlines()[-1].split()
    assert row[:2] == ["disk", "0"], "a chunk's KV goes with its document"


@pytest.mark.slow
def test_an_unreadable_document_changes_nothing(config: Path, docs: Path, minilm_dir: Path, smollm2_dir: Path) -> None:
    (docs / "broken.md").write_bytes(b"\xff\xfe\x00\xd8broken\x00")
    failed = run("collections", "ingest", docs, config=config, fails=True)
    assert "broken.md" in failed.stderr
    assert "docs" not in run("collections", "list", config=config).stdout
