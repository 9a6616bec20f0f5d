"""`promptsluice policy`: what it prints and how it exits, and that it needs no torch."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from promptsluice.gateway.cli.console import out
from promptsluice.gateway.cli.policy import app
from typer.testing import CliRunner

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "policies").glob("*.yaml"))
LOCAL = next(file for file in EXAMPLES if file.stem == "local")
BODY = {
    "model": "smollm2-135m-instruct:lossless",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Lines  with   space.\n\n\n\n" * 60},
        {"role": "user", "content": "What [bold]is[/bold] this?"},
    ],
}


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(BODY))
    return file


@pytest.fixture(autouse=True)
def no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty model cache: counts are estimates, and say so. The console takes its width when it is made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    out.cache_clear()
    yield
    out.cache_clear()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_good(file: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 0, result.output
    assert "the policy file is good" in result.stdout


def test_there_are_examples() -> None:
    assert {file.stem for file in EXAMPLES} >= {"minimal", "team", "rag"}


def test_check_prints_every_error_on_its_line_and_exits_with_1(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("version: 1\ndefault_polcy: off\nserver: {prt: 1}\n")
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"{file}:2: unknown key 'default_polcy'")
    assert second.startswith(f"{file}:3: unknown key 'prt'")


def test_check_warns_of_unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["check", str(EXAMPLES[-1])])
    assert "VLLM_API_KEY is not set" in result.stderr


def test_explain_prints_a_table_with_reasons(request_file: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(LOCAL), "--request", str(request_file)])
    assert result.exit_code == 0, result.output
    assert "policy lossless (model suffix), model smollm2-135m-instruct, backend local" in result.stdout
    for part in ("assistant", "history", "lossless leaves about 95%", "the question is never rewritten", "[bold]is"):
        assert part in result.stdout
    assert "estimates" in result.stderr


def test_explain_with_another_policy_says_that_nothing_is_done(request_file: Path) -> None:
    args = ["explain", str(LOCAL), "-r", str(request_file), "--policy", "off"]
    result = CliRunner().invoke(app, args)
    assert "nothing is done" in result.stdout
    assert "asked for" in result.stdout


def test_explain_as_json(request_file: Path) -> None:
    result = CliRunner().invoke(app, ["explain", str(LOCAL), "-r", str(request_file), "--json"])
    plan = json.loads(result.stdout)
    assert [step["name"] for step in plan["steps"]] == ["lossless"]
    assert len(plan["decisions"]) == 4
    assert all(decision["code"] and decision["reason"] for decision in plan["decisions"])
    assert plan["resolution"] == {
        "model": "smollm2-135m-instruct",
        "backend": "local",
        "policy": "lossless",
        "reason": "model suffix",
        "route": None,
        "rollout": None,
        "group": None,
        "shadow": None,
        "on_failure": "open",
    }


def test_explain_says_what_a_route_does_beside(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for model, says in (("llama-3.1-8b", "in shadow: policy shorter"), ("qwen3-32b", "of rollout shorter")):
        file.write_text(json.dumps({**BODY, "model": model}))
        shown = CliRunner().invoke(app, ["explain", str(EXAMPLES[0].with_name("rollout.yaml")), "-r", str(file)]).stdout
        assert says in shown
    assert "on failure: the request is refused" in shown


def test_explain_follows_headers(request_file: Path) -> None:
    args = ["explain", str(LOCAL), "-r", str(request_file), "-H", "X-Promptsluice-Policy: off"]
    assert "policy off (header" in CliRunner().invoke(app, args).stdout


def test_presets() -> None:
    listed = CliRunner().invoke(app, ["presets"]).stdout
    for name in ("off", "lossless", "balanced", "aggressive", "rag"):
        assert name in listed
    rag = yaml.safe_load(CliRunner().invoke(app, ["presets", "rag"]).stdout)
    assert rag["rag"]["reuse"] == {"mode": "blend", "ratio": "auto"}
    assert CliRunner().invoke(app, ["presets", "nope"]).exit_code != 0


@pytest.mark.slow
def test_no_torch(request_file: Path) -> None:
    code = (
        "import sys\nfrom promptsluice.gateway.cli.policy import app\n"
        f"try: app(['explain', {str(LOCAL)!r}, '-r', {str(request_file)!r}])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
