"""Any OpenAI-compatible server, or several alike. Destinations and the key come from the configuration,
never from a request.

The body goes out as the bytes that came in unless a policy changed it. Retries happen only before the first byte of an
answer, so that two answers are never glued together.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import httpx

from ...policies.schema import OpenAIBackend as UpstreamSpec
from ...prompt import Overloaded, Prompt, UpstreamError, UpstreamTimeout
from ...prompt.jsontext import splice
from ..edge import log
from .base import (
    ATTEMPTS_HEADER,
    Answer,
    Asked,
    Backend,
    Call,
    MessagesCall,
    ModelCard,
    Reading,
    Stream,
    TextCall,
    estimated_tokens,
)
from .forms import ChatForm, Form, MessagesForm
from .replies import Replies, note
from .sending import HttpxSender, Reply, Sender, Times, sender_to_upstreams
from .servers import Server, Servers
from .unpacking import CODINGS
from .upstream import Secret, listed_models, passed_headers, retry_after_s

_RETRIES = 2
_VERSION = "2023-06-01"  # of Anthropic's API, for clients that name none
_RETRIED_STATUS = frozenset({502, 503, 504})
_FINAL = (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout, httpx.DecodingError, httpx.LocalProtocolError)
"""Asked again, the answer would be as late or as unreadable, and paid for twice."""
_SENT = {"accept": "*/*", "accept-encoding": CODINGS, "user-agent": "promptsluice"}
_KEY_SIZE = 1024  # characters or ids of a raw prompt
_MODELS_KEPT_S = 60.0
_LARGE = 256 * 1024  # characters; less is rendered faster than it is handed to a thread


class UpstreamBackend(Backend):
    """Forwards chat and text completions to /chat/completions and /completions below a server's base URL; `relay` takes
    other bodies.

    `count` counts tokens where the tokenizer is known.
    """

    relays = True

    def __init__(
        self,
        name: str,
        spec: UpstreamSpec,
        *,
        api_key: str | None = None,
        count: Callable[[str], int] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(name)
        self._spec = spec
        self._secret = Secret(api_key)
        self._replies = Replies(name, self._secret)
        self._count = count or estimated_tokens
        self._given = None if transport is None else HttpxSender(transport)
        self._sender: Sender | None = None
        times = spec.timeouts
        self._times = {"connect": times.connect, "read": times.read, "write": times.write, "pool": times.pool}
        self._by_prefix = spec.balance == "prefix" and len(spec.servers) > 1
        self._servers = Servers(spec.all_servers, breaker=spec.breaker, by_prefix=self._by_prefix)
        self._listed: tuple[float, Sequence[ModelCard]] = (float("-inf"), ())

    async def start(self) -> None:
        self._sender = self._given or sender_to_upstreams(max_connections=self._spec.max_connections)

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.aclose()
            self._sender = None

    def count_tokens(self, text: str) -> int:
        return self._count(text)

    def stats(self) -> Mapping[str, float]:
        return self._servers.stats()

    async def models(self) -> Sequence[ModelCard]:
        """The configured names; without any, what the upstream lists (kept for a minute; nothing when it cannot be
        asked).
        """
        if self._spec.models:
            return [ModelCard(id=model, owned_by=self.name) for model in self._spec.models]
        asked, cards = self._listed
        if time.monotonic() - asked > _MODELS_KEPT_S:
            cards = await self._ask_models()
            self._listed = (time.monotonic(), cards)
        return cards

    async def complete(self, call: Call) -> Answer | Stream:
        prompt = call.prompt.with_fields(model=call.model, **self._told(call, call.prompt.body))
        body = await asyncio.to_thread(prompt.render) if prompt.chars > _LARGE else prompt.render()
        return await self._asked(
            "/chat/completions", body, call, self._chat_form(call, prompt.body), key=self._key(call, prompt)
        )

    async def continue_text(self, call: TextCall) -> Answer | Stream:
        body, fields = call.raw, self._told(call, call.body)
        if call.model != call.body["model"]:
            fields["model"] = call.model
        if fields:
            body = splice(
                body.decode(), replace={(name,): json.dumps(value) for name, value in fields.items()}
            ).encode()
        key = _beginning(call.body.get("prompt"), call.tenant) if self._by_prefix else b""
        return await self._asked("/completions", body, call, self._chat_form(call, call.body), key=key)

    @property
    def speaks_messages(self) -> bool:
        return self._spec.messages == "native"

    async def converse(self, call: MessagesCall) -> Answer | Stream:
        edits = {call.origins[path]: json.dumps(text, ensure_ascii=False) for path, text in call.prompt.edits.items()}
        if call.model != call.prompt.body["model"]:
            edits["model",] = json.dumps(call.model)
        body = await asyncio.to_thread(lambda: splice(call.raw.decode(), replace=edits).encode()) if edits else call.raw
        headers = {"anthropic-version": _VERSION, **call.versions, **self._messages_key()}
        form = MessagesForm(backend=self.name, secret=self._secret)
        return await self._asked(call.path, body, call, form, key=self._key(call, call.prompt), headers=headers)

    def _key(self, call: Call, prompt: Prompt) -> bytes:
        return _conversation(prompt, call.tenant) if self._by_prefix else b""

    def _told(self, call: Asked, body: Mapping[str, Any]) -> dict[str, Any]:
        """The field that has a stream tell its usage where only we want to know it; its reader keeps it to itself."""
        if not (call.stream and call.charged and self._spec.stream_usage) or call.include_usage:
            return {}
        return {"stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}

    def _chat_form(self, call: Asked, body: Mapping[str, Any]) -> ChatForm:
        continuous = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        return ChatForm(backend=self.name, secret=self._secret, include_usage=call.include_usage, continuous=continuous)

    async def _asked(
        self,
        path: str,
        body: bytes,
        call: Asked,
        form: Form,
        *,
        key: bytes,
        headers: Mapping[str, str] | None = None,
    ) -> Answer | Stream:
        """`headers` take the place of the usual authorization."""
        sent = self._headers(call.headers, request_id=call.request_id, stream=call.stream, others=headers)
        response, attempts = await self._send(path, body, sent, key=key, reading=call.reading)
        headers = {**passed_headers(response.headers), ATTEMPTS_HEADER: str(attempts)}
        if call.stream and response.status == 200:
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                frames = self._replies.frames(response, call, form.reader())
                return Stream(frames=frames, headers=headers, asked_at=response.asked_at)
            await response.aclose()
            raise UpstreamError(f"backend {self.name!r} answered a streaming request with no event stream")
        answer = await self._replies.whole(response, headers, form)
        note(call, answer.usage)
        return answer

    async def relay(
        self,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str],
        request_id: str,
        reading: Reading | None = None,
    ) -> Answer:
        sent = self._headers(headers, request_id=request_id)
        response, attempts = await self._send(path, body, sent, reading=reading or Reading())
        passed = {**passed_headers(response.headers), ATTEMPTS_HEADER: str(attempts)}
        return await self._replies.whole(response, passed, ChatForm(backend=self.name, secret=self._secret))

    async def _send(
        self, path: str, body: bytes, headers: Mapping[str, str], *, reading: Reading, key: bytes = b""
    ) -> tuple[Reply, int]:
        """Send until a response has begun; a few more times, to another server if there is one, else after a pause."""
        attempt, tried = 0, list[Server]()
        while True:
            attempt += 1
            server = self._servers.next(key=key, tried=tried)
            tried.append(server)
            try:
                response = await self._attempt(server, path, body, headers, reading)
            except httpx.HTTPError as error:
                if isinstance(error, _FINAL) or not self._again(attempt):
                    ours = self._replies.ours(error)
                    ours.headers[ATTEMPTS_HEADER] = str(attempt)
                    raise ours from error
            else:
                if not self._better_elsewhere(response, tried) or not self._again(attempt):
                    return response, attempt
                await response.aclose()
            if not self._servers.others(tried):
                await asyncio.sleep(random.uniform(0.05, 0.1) * 2**attempt)

    def _again(self, attempt: int) -> bool:
        return attempt <= _RETRIES and self._servers.any()

    def _better_elsewhere(self, response: Reply, tried: Sequence[Server]) -> bool:
        """Whether an answer is none. One that says when to come back is told to the client if nobody else is there."""
        if response.status in _RETRIED_STATUS and retry_after_s(response.headers) is None:
            return True
        return response.status in (429, *_RETRIED_STATUS) and self._servers.others(tried)

    async def _attempt(
        self, server: Server, path: str, body: bytes, headers: Mapping[str, str], reading: Reading
    ) -> Reply:
        server.asked()
        try:
            response = await self._sent("POST", f"{server.base_url}{path}", body, headers, begun=reading.begin)
        except httpx.HTTPError as error:
            if not isinstance(error, httpx.PoolTimeout | httpx.LocalProtocolError):  # our own limit, our own fault
                server.failed()
            raise
        log.debug("request %s: %s answered %d", headers["x-request-id"], self.name, response.status)
        rest = retry_after_s(response.headers)
        if response.status in _RETRIED_STATUS and rest is None:
            server.failed()
        else:
            server.succeeded(rest_s=rest or 0.0 if response.status in (429, *_RETRIED_STATUS) else 0.0)
        return response

    async def _sent(
        self,
        method: str,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        times: Times | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> Reply:
        """The response once it has begun. `times` are timeouts by phase, in seconds, by default the file's."""
        assert self._sender is not None, f"backend {self.name!r} was not started"
        sent = {**_SENT, **headers}
        return await self._sender.send(method, url, headers=sent, body=body, times=times or self._times, begun=begun)

    def _headers(
        self,
        forwarded: Mapping[str, str],
        *,
        request_id: str,
        stream: bool = False,
        others: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        return {
            **forwarded,
            **(self._authorization() if others is None else others),
            "content-type": "application/json",
            "accept": "text/event-stream" if stream else "application/json",
            "x-request-id": request_id,
        }

    def _authorization(self) -> dict[str, str]:
        return {} if self._secret.value is None else {"authorization": f"Bearer {self._secret.value}"}

    def _messages_key(self) -> dict[str, str]:
        key = self._secret.value
        return self._authorization() if key is None or self._spec.messages_key != "x-api-key" else {"x-api-key": key}

    async def _ask_models(self) -> Sequence[ModelCard]:
        try:
            url, times = f"{self._servers.next().base_url}/models", dict.fromkeys(self._times, 5.0)
            response = await self._sent("GET", url, b"", self._authorization(), times=times)
            body = await self._replies.body(response)
        except (httpx.HTTPError, Overloaded, UpstreamError, UpstreamTimeout):
            return ()
        return listed_models(body) if response.status == 200 else ()


def _conversation(prompt: Prompt, tenant: str) -> bytes:
    """Tells conversations apart by how they began, as the client sent it, whatever was retrieved or pruned."""
    first = next((segment.message for segment in prompt.segments if segment.role == "user"), None)
    digest = blake2b(tenant.encode())
    for segment in prompt.segments:
        if segment.original and (first is None or segment.message <= first):
            digest.update(segment.original.encode("utf-8", "replace"))
    return digest.digest()


def _beginning(prompt: Any, tenant: str) -> bytes:
    """The same of a raw prompt: a text, ids, or a list of these, of which the first counts."""
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    shown = prompt[:_KEY_SIZE] if isinstance(prompt, str | list) else ""
    return f"{tenant}/{shown}".encode("utf-8", "replace")
