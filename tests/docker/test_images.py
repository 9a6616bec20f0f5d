"""The images, held together with the Makefile and the command line. No container engine is needed, and none is run."""

import http.server
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
INSTRUCTIONS = re.compile("ARG|CMD|COPY|ENTRYPOINT|ENV|EXPOSE|FROM|HEALTHCHECK|RUN|STOPSIGNAL|USER|VOLUME|WORKDIR")


@dataclass(frozen=True)
class Stage:
    """One stage of the build: its name, what it starts from and its instructions as (word, rest)."""

    name: str
    parent: str
    steps: tuple[tuple[str, str], ...]

    def last(self, word: str) -> str | None:
        return next((rest for w, rest in reversed(self.steps) if w == word), None)


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's logical lines; fails on a word that no Dockerfile has."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    pairs = [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]
    assert all(INSTRUCTIONS.fullmatch(word) for word, _ in pairs)
    return pairs


def stages() -> dict[str, Stage]:
    found: list[tuple[str, str, list[tuple[str, str]]]] = []
    for word, rest in instructions():
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            assert name, f"a stage without a name: {rest}"
            found.append((name, parent, []))
        elif found:
            found[-1][2].append((word, rest))
        else:
            assert word == "ARG", f"{word} before the first FROM"
    return {name: Stage(name, parent, tuple(steps)) for name, parent, steps in found}


def ancestry(name: str) -> list[Stage]:
    """The stage and those it starts from, nearest first."""
    known, chain = stages(), [stages()[name]]
    while chain[-1].parent in known:
        chain.append(known[chain[-1].parent])
    return chain


def inherited(name: str, word: str) -> str:
    value = next((found for stage in ancestry(name) if (found := stage.last(word)) is not None), None)
    assert value is not None, f"{name} has no {word}"
    return value


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def makefile_variables() -> set[str]:
    return set(re.findall(r"^([A-Z_]+) [?:]?=", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_python_packages_come_from_make_install_only() -> None:
    """One place: the recipe of `make install`. The images call it, with variables that it has."""
    runs = [rest for word, rest in instructions() if word == "RUN"]
    calls = [
        shlex.split(call) for run in runs for call in re.findall(r"\bmake (?!&)([^&|;]+)", run) if "install" in call
    ]
    assert calls == [["install", "VENV=/opt/venv", "PIP_EXTRA=${PIP_EXTRA}"]]
    assert not any(re.search(r"\bpip3? install\b|\buv\b|\bconda\b", run) for run in runs)
    for target, *settings in calls:
        assert target in makefile_targets()
        assert {setting.split("=")[0] for setting in settings} <= makefile_variables()


def test_make_install_does_what_the_image_expects() -> None:
    """A dry run of the same command: an environment at VENV, the constraints, and the package installed into it."""
    made = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "install", "VENV=/nonexistent/venv", "PIP_EXTRA=--marker"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "-m venv /nonexistent/venv" in made
    installs = [line for line in made.splitlines() if "pip install" in line]
    assert installs
    assert all(line.startswith("/nonexistent/venv/bin/") for line in installs)
    assert all("--marker" in line and "-c constraints.txt" in line for line in installs)
    assert any("-e ." in line or "-e '." in line for line in installs)


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_each_image_runs_as_an_ordinary_user_with_its_data_in_a_volume(image: str) -> None:
    user = inherited(image, "USER")
    assert user.split(":")[0].isdigit() and int(user.split(":")[0]) >= 1000
    (volume,) = re.findall(r'"([^"]+)"', inherited(image, "VOLUME"))
    environment = " ".join(rest for stage in ancestry(image) for word, rest in stage.steps if word == "ENV")
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "HOME"):
        (value,) = re.findall(rf"(?<!\w){name}=(\S+)", environment)
        assert value == volume or value.startswith(volume + "/"), f"{name} is not in the volume"
    assert "OMP_WAIT_POLICY=PASSIVE" in environment
    owned = " ".join(rest for stage in ancestry(image) for word, rest in stage.steps if word == "RUN")
    assert f"--uid {user.split(':')[0]}" in owned


@pytest.mark.slow
@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_each_image_is_checked_and_starts_the_gateway(image: str) -> None:
    assert "docker/healthcheck.py" in inherited(image, "HEALTHCHECK")
    assert inherited(image, "ENTRYPOINT") == '["promptsluice"]'
    command = re.findall(r'"([^"]+)"', inherited(image, "CMD"))
    assert command[0] == "serve"
    shown = subprocess.run(
        [sys.executable, "-m", "promptsluice", "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(option in shown for option in command if option.startswith("--"))
    assert inherited(image, "EXPOSE") == command[command.index("--port") + 1]


def test_the_last_stage_is_the_cpu_image() -> None:
    assert list(stages())[-1] == "cpu"


def test_copied_files_exist_and_pass_the_ignore_file() -> None:
    allowed = allowlist()
    for word, rest in instructions():
        if word != "COPY" or rest.startswith("--from"):
            continue
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source == "." or source in allowed, f"{source} is kept out by the ignore file"


def test_the_build_sees_every_package_and_nothing_private() -> None:
    allowed = allowlist()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {package.split(".")[1] for package in packages if "." in package}
    assert rooms <= allowed
    assert not allowed & {".git", ".venv", ".env", "tests", "docs"}
    assert all((ROOT / name).exists() for name in allowed)


def allowlist() -> set[str]:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "the ignore file must begin by keeping everything out"
    return {rule.removeprefix("!") for rule in rules if rule.startswith("!")}


def test_the_skeleton_is_what_an_editable_install_needs(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    subprocess.run([sys.executable, DOCKER / "skeleton.py"], cwd=tmp_path, check=True)
    made = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("__init__.py")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert made == {"/".join(package.split(".")[1:]) or "." for package in packages}


@pytest.fixture
def server() -> Iterator[tuple[int, dict[str, int]]]:
    """A server whose /healthz answers the status in the dict."""
    answers = {"/healthz": 200}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers.get(self.path, 404))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        yield listening.server_address[1], answers
        listening.shutdown()
        thread.join()


def healthcheck(port: int) -> int:
    environment = {"PROMPTSLUICE_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run([sys.executable, DOCKER / "healthcheck.py"], env=environment, capture_output=True).returncode


@pytest.mark.slow
def test_the_health_check_follows_the_server(server: tuple[int, dict[str, int]]) -> None:
    port, answers = server
    assert healthcheck(port) == 0
    answers["/healthz"] = 503
    assert healthcheck(port) == 1


def test_the_health_check_fails_where_nothing_listens(unused_tcp_port: int) -> None:
    assert healthcheck(unused_tcp_port) == 1
