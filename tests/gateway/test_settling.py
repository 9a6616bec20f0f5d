"""What a request is charged for where nobody tells what was used, and where its client does not wait for the end."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from promptsluice.gateway.app import create_app
from promptsluice.gateway.backends.base import Answer, Call, Frame, Stream
from promptsluice.gateway.backends.echo import EchoBackend
from promptsluice.gateway.backends.openai import UpstreamBackend
from promptsluice.policies import CostModel, Ledger, PolicySet
from promptsluice.policies.match import digest
from promptsluice.policies.schema import OpenAIBackend
from promptsluice.prompt import Usage

from .harness import Driven

CHAT, MESSAGES, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
QUESTION = "four letters make a token " * 40
PROMPT = len(QUESTION) // 4
FILE = f"""
version: 1
default_policy: off
server: {{api_keys: [{{name: one, sha256: {digest("one")}, limits: {{tokens_per_day: 1000000}}}}]}}
backends:
  far: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [far]}}
  native: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [native], messages: native}}
  old: {{kind: openai, base_url: "http://127.0.0.1:9/v1", models: [old], stream_usage: false}}
"""


class Scripted(httpx.AsyncBaseTransport):
    """An upstream: its head after `head`, then `pieces`, then the end after `end`."""

    def __init__(self) -> None:
        self.asked, self.told = asyncio.Event(), asyncio.Event()
        self.head, self.end = asyncio.Event(), asyncio.Event()
        self.pieces: Sequence[bytes] = ()
        self.status = 200

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.set()
        await self.head.wait()
        return httpx.Response(
            self.status, headers={"content-type": "text/event-stream"}, stream=_Pieces(self), request=request
        )


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, script: Scripted) -> None:
        self._script = script

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._script.pieces:
            yield piece
        self._script.told.set()
        await self._script.end.wait()


class House:
    def __init__(self, app: Any, upstream: Scripted) -> None:
        self.app, self.upstream = app, upstream

    def ask(self, path: str = CHAT, **fields: Any) -> Driven:
        what: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
        if path in (TEXT, EMBEDDINGS, RESPONSES):
            what = {"prompt" if path == TEXT else "input": QUESTION}
        most = "max_output_tokens" if path == RESPONSES else "max_tokens"
        return Driven(self.app, path, {"model": "far", most: 99, **what, **fields}, key="one")

    async def until(self, event: asyncio.Event, asked: Driven) -> None:
        """Return when it has come; an answer before that is a mistake in the test."""
        waiting = asyncio.ensure_future(event.wait())
        await asyncio.wait({waiting, asked.done}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert event.is_set(), asked.sent

    @property
    def charged(self) -> float:
        registry = self.app.state.sluice.metrics.registry
        return registry.get_sample_value("promptsluice_key_tokens_total", {"key": "one"}) or 0.0


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    policies = PolicySet.from_text(FILE + f"collections: {{root: {tmp_path}/c}}\nkv_cache: {{path: {tmp_path}/kv}}\n")
    upstream, backends = Scripted(), {}
    for name, spec in policies.backends.items():
        assert isinstance(spec, OpenAIBackend)
        backends[name] = UpstreamBackend(name, spec, transport=upstream)
    app = create_app(policies, backends=backends)
    async with app.router.lifespan_context(app):
        yield House(app, upstream)


def chunk(delta: dict[str, Any], **more: Any) -> bytes:
    told = {"index": 0, "delta": delta, "finish_reason": None, **more}
    return b"data: " + json.dumps({"id": "c", "choices": [told]}).encode() + b"\n\n"


DONE = chunk({}, finish_reason="stop") + b"data: [DONE]\n\n"


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, MESSAGES, TEXT, RESPONSES, EMBEDDINGS])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_before_an_answer_begins_pays_the_prompt(house: House, path: str, stream: bool) -> None:
    asked = house.ask(path, stream=stream)
    await house.until(house.upstream.asked, asked)
    await asked.leave()
    assert not asked.sent
    assert PROMPT - 1 <= house.charged <= PROMPT + 30, "an estimate, for embeddings of the whole body"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_pays_for_thoughts_that_nobody_is_shown(house: House, path: str) -> None:
    sent: list[dict[str, Any]] = []
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 300, "completion_tokens": 5000}}\n\n'

    async def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        asked = (sent[-1].get("stream_options") or {}).get("include_usage")
        words = chunk({"content": "word"}) + chunk({}, finish_reason="stop") + (usage if asked else b"")
        return httpx.Response(
            200,
            headers={"content-type": "text/event-stream"},
            content=words + b"data: [DONE]\n\n",
            request=request,
        )

    house.upstream.handle_async_request = answer
    asked = house.ask(path, stream=True, stream_options={"include_usage": False})
    await asked.done
    assert sent[0]["stream_options"] == {"include_usage": True} and house.charged == 5300
    body = b"".join(message.get("body", b"") for message in asked.sent)
    assert b"word" in body and b"5000" not in body, "its client did not ask"
    await house.ask(path, stream=True).done
    assert sent[1]["stream_options"] == {"include_usage": True} and house.charged == 2 * 5300
    await house.ask(path).done
    await house.ask(path, model="old", stream=True).done
    assert all("stream_options" not in one for one in sent[2:]) and len(sent) == 4


class Late(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield chunk({"role": "assistant", "content": ""})
        raise httpx.ReadTimeout("late")


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, MESSAGES, TEXT, RESPONSES, EMBEDDINGS])
@pytest.mark.parametrize("late", ["head", "stream", "server"])
async def test_what_does_not_come_in_time_costs_the_prompt(house: House, path: str, late: str) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        if late == "head":
            raise httpx.ReadTimeout("late")
        if late == "stream":
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Late(), request=request)
        raise TimeoutError  # as the limit of the whole request has it

    house.upstream.handle_async_request = answer
    await house.ask(path, stream=late == "stream" and path != EMBEDDINGS).done
    assert PROMPT - 1 <= house.charged <= PROMPT + 30


@pytest.mark.slow
async def test_a_server_that_was_not_reached_costs_nothing(house: House) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("late")

    house.upstream.handle_async_request = answer
    asked = house.ask()
    await asked.done
    assert asked.status == 502 and house.charged == 0


class Waiting(EchoBackend):
    """Has no free place."""

    def __init__(self) -> None:
        super().__init__("far", models=["far"])
        self.asked = asyncio.Event()

    async def complete(self, call: Call) -> Answer | Stream:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_who_leaves_before_the_prompt_goes_out_pays_nothing(house: House) -> None:
    backend = house.app.state.sluice.backends["far"] = Waiting()
    asked = house.ask()
    await house.until(backend.asked, asked)
    await asked.leave()
    assert not asked.sent and house.charged == 0


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_who_leaves_before_the_first_token_pays_the_prompt(house: House, path: str) -> None:
    house.upstream.head.set()
    house.upstream.pieces = [chunk({"role": "assistant", "content": ""})]
    asked = house.ask(path, stream=True)
    await house.until(house.upstream.told, asked)
    await asked.leave()
    assert house.charged == PROMPT


THOUGHTS = [
    (CHAT, "far", lambda text: chunk({"reasoning_content": text})),
    (CHAT, "far", lambda text: chunk({"content": None, "reasoning": text})),
    (MESSAGES, "far", lambda text: chunk({"reasoning_content": text})),
    (RESPONSES, "far", lambda text: chunk({"reasoning_content": text})),
    (
        MESSAGES,
        "native",
        lambda text: (
            b"data: "
            + json.dumps(
                {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": text}}
            ).encode()
            + b"\n\n"
        ),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "model", "thought"), THOUGHTS)
async def test_thoughts_are_paid_by_who_reads_only_them(
    house: House, path: str, model: str, thought: Callable[[str], bytes]
) -> None:
    house.upstream.head.set()
    house.upstream.pieces = [thought("hmm " * 100)] * 5
    asked = house.ask(path, model=model, stream=True)
    await house.until(house.upstream.told, asked)
    await asked.leave()
    assert house.charged == PROMPT + 500


@pytest.mark.slow
@pytest.mark.parametrize(
    "pieces",
    [
        [chunk({"content": "word" * 500})] * 4,
        [chunk({"content": "word"})] * 2000,
        [chunk({"content": "w"})] * 2000,
        [chunk({"content": "w"}) * 2000],
        [chunk({"content": "word" * 500}, logprobs={"content": [{"token": "word", "bytes": [1] * 4000}]})] * 4,
        [chunk({"content": "w" if at % 2 else "word" * 1000}) for at in range(4)],
        [chunk({"tool_calls": [{"index": 0, "function": {"arguments": "word" * 500}}]})] * 4,
        [chunk({"refusal": "word" * 250}, text="word" * 250)] * 4,
    ],
    ids=["large", "small", "tiny", "tiny and together", "with log-probabilities", "uneven", "calls", "other fields"],
)
async def test_without_usage_a_stream_pays_for_its_text_however_it_is_cut(house: House, pieces: list[bytes]) -> None:
    house.upstream.head.set()
    house.upstream.end.set()
    house.upstream.pieces = [*pieces, DONE]
    asked = house.ask(stream=True)
    await asked.done
    assert asked.status == 200 and house.charged == pytest.approx(PROMPT + 2000, abs=2)


async def test_what_breaks_off_before_the_first_token_costs_nothing(house: House) -> None:
    house.upstream.head.set()
    house.upstream.end.set()
    house.upstream.pieces = [chunk({"role": "assistant", "content": ""})]
    await house.ask(stream=True).done
    house.upstream.status = 400
    await house.ask(stream=True).done
    assert house.charged == 0


class AskedLongAgo(EchoBackend):
    """Says that it was asked a minute before it was."""

    async def complete(self, call: Call) -> Answer | Stream:
        return Stream(frames=self._frames(), asked_at=time.perf_counter() - 60)

    async def _frames(self) -> AsyncGenerator[Frame, None]:
        yield Frame(data=b'{"choices":[{"index":0,"delta":{"content":"word"}}]}', content=4)
        yield Frame(data=b"", usage=Usage(prompt_tokens=100, completion_tokens=1))


class Told(Ledger):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(CostModel())
        self.prefills: list[tuple[int, float]] = []

    def ran(self, what: str, *, tokens: int, ms: float, predicted_ms: float | None = None) -> None:
        assert what == "prefill"
        self.prefills.append((tokens, ms))


async def test_what_is_learned_of_an_upstream_begins_when_it_is_asked(tmp_path: Path) -> None:
    text = FILE + f"collections: {{root: {tmp_path}/c}}\nkv_cache: {{path: {tmp_path}/kv}}\n"
    backend = AskedLongAgo("far", models=["far"])
    backend.ledger = told = Told()
    app = create_app(PolicySet.from_text(text), backends={"far": backend})
    async with app.router.lifespan_context(app):
        await Driven(
            app, CHAT, {"model": "far", "messages": [{"role": "user", "content": "hi"}], "stream": True}, key="one"
        ).done
    ((tokens, ms),) = told.prefills
    assert tokens == 100 and ms >= 60_000
