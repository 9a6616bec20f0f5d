"""New versions of the policy file while the server runs: in force as a whole, or refused as a whole."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from promptsluice.gateway.house import Sluice
from promptsluice.gateway.reload import Looks
from promptsluice.policies import PolicySet
from promptsluice.prompt import UpstreamError

from .harness import Exchange, Gateway, Upstream, eventually, http, start_gateway, stop_gateway

HI = [{"role": "user", "content": "hi"}]
FIRST = """
version: 1
default_policy: off
backends:
  far: {kind: openai, base_url: "http://127.0.0.1:PORT/v1", models: [one]}
"""
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":%s}]}\n\n'


class Running:
    """A gateway and the file that it watches."""

    def __init__(self, path: Path, upstream: Upstream) -> None:
        self._path = path
        self._port = str(upstream.port)
        self.write(FIRST)
        self.gateway: Gateway = start_gateway(path)

    def write(self, text: str) -> None:
        """As editors do it: aside, then into place."""
        aside = self._path.with_suffix(".tmp")
        aside.write_text(text.replace("PORT", self._port))
        os.replace(aside, self._path)

    def models(self) -> list[str]:
        return [model["id"] for model in http.get(f"{self.gateway.url}/v1/models").json()["data"]]

    def reloads(self, outcome: str) -> float:
        return self.gateway.metric(f'promptsluice_policy_reloads_total{{outcome="{outcome}"}}')


@pytest.fixture(scope="module")
def process(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("reload") / "policy.yaml", upstream)
    yield made
    stop_gateway(made.gateway)


@pytest.fixture
def running(process: Running, upstream: Upstream) -> Running:
    """A gateway whose first version is in force."""
    upstream.answer(lambda exchange: exchange.json("200 OK", b'{"choices": []}'))
    if process.models() != ["one"]:  # writing the same again would be one more version
        process.write(FIRST)
        eventually(lambda: process.models() == ["one"])
    return process


@pytest.mark.slow
def test_a_new_version_comes_into_force(running: Running) -> None:
    assert running.models() == ["one"]
    before = running.reloads("accepted")
    running.write(FIRST.replace("[one]", "[one, two]").replace("default_policy: off", "default_policy: lossless"))
    eventually(lambda: running.models() == ["one", "two"])
    answer = running.gateway.post({"model": "two", "messages": HI})
    assert answer.status_code == 200 and answer.headers["x-promptsluice-policy"] == "lossless"
    assert running.reloads("accepted") == before + 1
    assert http.get(f"{running.gateway.url}/readyz").json() == {"status": "ready", "reasons": {}}


def test_a_file_that_still_grows_is_no_version() -> None:
    looks = Looks((1, 1, 1))
    assert [looks.new(found) for found in ((1, 1, 1), (2, 0, 1), (2, 9, 1), None, (3, 20, 2))] == [False] * 5
    assert looks.new((3, 20, 2)) and not looks.new((3, 20, 2))
    assert not looks.new(None) and not looks.new((3, 20, 2)), "back again, as it was"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("models: [one]", "models: [one], speed: 9"), "speed"),
        (("[one]}", "[one]"), "policy.yaml"),
        (("default_policy: off", "default_policy: none-such"), "none-such"),
        (("default_policy: off", "kv_cache: {ram: 1MiB}"), "only a restart can change kv_cache"),
        (("default_policy: off", "server: {max_body_bytes: 1MiB}"), "only a restart can change server"),
        (("[one]", "[one], api_key_env: THERE_IS_NO_SUCH_KEY"), "THERE_IS_NO_SUCH_KEY"),
    ],
)
def test_what_is_refused_changes_nothing(running: Running, change: tuple[str, str], says: str) -> None:
    before, log = running.reloads("refused"), running.gateway.log
    told = len(log.read_text())
    running.write(FIRST.replace(*change))
    eventually(lambda: running.reloads("refused") == before + 1)
    assert running.gateway.metric("promptsluice_policy_file_accepted") == 0
    ready = http.get(f"{running.gateway.url}/readyz")
    assert ready.status_code == 200 and says in ready.json()["policy_file"]
    assert "is refused, the old one stays in force" in log.read_text()[told:]
    answer = running.gateway.post({"model": "one", "messages": HI})
    assert answer.status_code == 200 and answer.headers["x-promptsluice-policy"] == "off"
    running.write(FIRST.replace("[one]", "[mended]"))
    eventually(lambda: running.models() == ["mended"])
    assert running.gateway.metric("promptsluice_policy_file_accepted") == 1
    assert "policy_file" not in http.get(f"{running.gateway.url}/readyz").json()


def test_a_stream_ends_under_the_version_that_it_began_with(running: Running, upstream: Upstream) -> None:
    let_go = asyncio.Event()

    async def in_two_pieces(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.send(CHUNK % (b"a", b"null"))
        await let_go.wait()
        await exchange.send(CHUNK % (b"b", b'"stop"') + b"data: [DONE]\n\n")

    upstream.answer(in_two_pieces)
    body = {"model": "one", "messages": HI, "stream": True}
    with httpx.stream("POST", f"{running.gateway.url}/v1/chat/completions", json=body, timeout=120) as response:
        pieces = response.iter_text()
        text = next(pieces)
        running.write(FIRST.replace("far:", "other:").replace("[one]", "[two]"))
        eventually(lambda: running.models() == ["two"])
        upstream.soon(let_go.set)
        text += "".join(pieces)
    assert '"content":"b"' in text and text.endswith("data: [DONE]\n\n")
    assert running.gateway.post({"model": "one", "messages": HI}).status_code == 404


@pytest.mark.slow
async def test_a_backend_stays_while_a_request_of_any_version_needs_it() -> None:
    """The second version came and went while a request of the first one, which has the same backend, was running."""

    def version(*, policy: str, read: int) -> PolicySet:
        backend = f"{{kind: openai, base_url: 'http://127.0.0.1:9/v1', timeouts: {{read: {read}}}}}"
        return PolicySet.from_text(f"version: 1\ndefault_policy: {policy}\nbackends: {{far: {backend}}}")

    first = await Sluice.open(version(policy="off", read=1))
    far = first.backends["far"]
    with first.held():
        second = await first.rewired(version(policy="lossless", read=1), given={})
        leaving = asyncio.create_task(first.retire())
        third = await second.rewired(version(policy="lossless", read=2), given={})
        await second.retire()
        assert second.backends["far"] is far and third.backends["far"] is not far
        assert not leaving.done()
        with pytest.raises(UpstreamError, match="cannot be reached"):  # it still asks
            await far.relay("/embeddings", b"{}", headers={}, request_id="r")
    await leaving
    with pytest.raises(AssertionError, match="was not started"):
        await far.relay("/embeddings", b"{}", headers={}, request_id="r")
    await third.close()
