"""The command line itself: quick help without torch, versions, errors as one message, models."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from promptsluice import __version__
from promptsluice.gateway.cli import app
from promptsluice.gateway.cli.console import CleanErrors
from promptsluice.prompt import NotFound
from typer.testing import CliRunner

HEAVY = ("torch", "transformers", "faiss", "sentence_transformers", "fastapi", "openai")
COMMANDS = (
    "serve",
    "demo",
    "version",
    "models list",
    "models pull",
    "models path",
    "policy check",
    "policy explain",
    "collections ingest",
    "collections list",
    "collections search",
    "collections delete",
    "kv status",
    "kv warm",
)


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.mark.slow
def test_help_of_every_command_loads_nothing_heavy() -> None:
    script = f"""
import sys
from typer.testing import CliRunner
from promptsluice.gateway.cli import app
for command in {("", *COMMANDS)!r}:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, (command, result.output)
    assert "Usage" in result.output
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(runner: CliRunner, arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0
    assert result.output == f"promptsluice {__version__}\n"


@pytest.mark.slow
def test_the_installed_command_is_this_app() -> None:
    run = subprocess.run([sys.executable, "-m", "promptsluice", "version"], capture_output=True, text=True)
    assert run.stdout == f"promptsluice {__version__}\n"


def test_our_errors_are_a_message_and_exit_code_1(runner: CliRunner, tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text("version: 1\ndefault_polcy: balanced\n")
    result = runner.invoke(app, ["serve", "--config", str(file)])
    assert result.exit_code == 1
    assert f"error: {file}:2: " in result.stderr
    assert "default_policy" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_errors_that_are_bugs_keep_their_traceback(runner: CliRunner) -> None:
    failing = typer.Typer(cls=CleanErrors)
    errors: dict[str, Exception] = {"ours": NotFound("it is not there"), "bug": ValueError("oops")}

    @failing.command()
    def fail(which: str) -> None:
        raise errors[which]

    @failing.command()
    def other() -> None:
        """A second command makes it a group."""

    ours = runner.invoke(failing, ["fail", "ours"])
    assert (ours.exit_code, ours.stderr) == (1, "error: it is not there\n")
    bug = runner.invoke(failing, ["fail", "bug"])
    assert bug.exception is errors["bug"]


def test_models_list_and_path_of_an_empty_cache(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listed = runner.invoke(app, ["models", "list"])
    assert listed.exit_code == 0
    for name in ("smollm2-135m-instruct", "all-minilm-l6-v2"):
        assert name in listed.stdout
    assert listed.stdout.count("absent") == 2
    missing = runner.invoke(app, ["models", "path", "smollm2-135m-instruct"])
    assert missing.exit_code == 1
    assert "promptsluice models pull smollm2-135m-instruct" in missing.stderr
    unknown = runner.invoke(app, ["models", "pull", "nonsense"])
    assert unknown.exit_code == 1
    assert "known names are" in unknown.stderr


def test_models_path_of_a_folder_is_the_folder(runner: CliRunner, tiny_llama_dir: Path) -> None:
    result = runner.invoke(app, ["models", "path", str(tiny_llama_dir)])
    assert result.stdout.strip() in (str(tiny_llama_dir), "")
    assert (result.exit_code == 0) == bool(result.stdout.strip())


def test_serve_offline_without_its_model_says_what_to_run(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = runner.invoke(app, ["serve", "--offline"])
    assert result.exit_code == 1
    assert "promptsluice models pull" in result.stderr


def test_serve_sets_set_environment_before_torch(tmp_path: Path) -> None:
    script = """
import os, sys
from promptsluice.gateway.cli.serve import set_environment
os.environ.pop("OMP_WAIT_POLICY", None)
os.environ["TOKENIZERS_PARALLELISM"] = "true"
set_environment()
assert "torch" not in sys.modules
print(os.environ["OMP_WAIT_POLICY"], os.environ["TOKENIZERS_PARALLELISM"])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["PASSIVE", "true"], "what the user has set stays"
