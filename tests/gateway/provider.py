"""A well-behaved OpenAI server for the upstream double: whole and streamed, with tools, schemas and embeddings."""

import base64
import json
import struct
from typing import Any

from .harness import Exchange

HEAD = {"id": "chatcmpl-far", "created": 1_700_000_000, "model": "far-2026"}
USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 4}}
WORDS = ["Hello ", "from ", "far ", "away."]
FORECAST = '{"city": "Oslo", "degrees": -3}'
DIMENSIONS = 8


async def provide(exchange: Exchange) -> None:
    """Answer by the route, as a provider would."""
    route = exchange.line.split()[1]
    if route == "/v1/models":
        await exchange.json("200 OK", b'{"object": "list", "data": [{"id": "far", "object": "model"}]}')
        return
    body = json.loads(exchange.body)
    if "input" not in body and route == "/v1/embeddings":
        await exchange.json("400 Bad Request", b'{"error": {"message": "no input", "type": "invalid_request_error"}}')
    elif route == "/v1/embeddings":
        await exchange.json("200 OK", json.dumps(_embeddings(body)).encode())
    elif body.get("stream"):
        await exchange.head()
        for chunk in _chunks(body, chat=route == "/v1/chat/completions"):
            await exchange.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await exchange.send(b"data: [DONE]\n\n")
    else:
        await exchange.json("200 OK", json.dumps(_whole(body, chat=route == "/v1/chat/completions")).encode())


def _tool(body: dict[str, Any]) -> str | None:
    """The function to call: the first one, unless its result is there already."""
    answered = any(message.get("role") == "tool" for message in body.get("messages", ()))
    tools = body.get("tools") or ()
    return None if answered or not tools or body.get("tool_choice") == "none" else tools[0]["function"]["name"]


def _words(body: dict[str, Any]) -> list[str]:
    wanted = body.get("response_format") or {}
    return [FORECAST[:9], FORECAST[9:]] if wanted.get("type") in ("json_schema", "json_object") else WORDS


def _whole(body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    text, name = "".join(_words(body)), _tool(body)
    if not chat:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
        return {**HEAD, "object": "text_completion", "choices": [choice], "usage": USAGE}
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if name is not None:
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": FORECAST}}
        message |= {"content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls" if name else "stop"}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def _chunks(body: dict[str, Any], *, chat: bool) -> list[dict[str, Any]]:
    words, name = _words(body), _tool(body)
    told = [] if not (body.get("stream_options") or {}).get("include_usage") else [{"choices": [], "usage": USAGE}]
    if not chat:
        head = {**HEAD, "object": "text_completion"}
        texts = [{"index": 0, "text": word, "logprobs": None, "finish_reason": None} for word in words]
        texts[-1]["finish_reason"] = "stop"
        return [*({**head, "choices": [one]} for one in texts), *({**head, **one} for one in told)]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "" if name is None else None}]
    if name is None:
        deltas += [{"content": word} for word in words]
    else:
        begun = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
        pieces = [{"index": 0, "function": {"arguments": piece}} for piece in (FORECAST[:9], FORECAST[9:])]
        deltas += [{"tool_calls": [one]} for one in (begun, *pieces)]
    head = {**HEAD, "object": "chat.completion.chunk"}
    ends = [(delta, None) for delta in deltas] + [({}, "stop" if name is None else "tool_calls")]
    chunks = [{"index": 0, "delta": delta, "finish_reason": reason} for delta, reason in ends]
    return [*({**head, "choices": [one]} for one in chunks), *({**head, **one} for one in told)]


def _embeddings(body: dict[str, Any]) -> dict[str, Any]:
    given = body["input"]
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    asked = body.get("dimensions")
    vector = [1.0] + [0.0] * ((asked if isinstance(asked, int) else DIMENSIONS) - 1)
    wire: Any = vector
    if body.get("encoding_format") == "base64":
        wire = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    data = [{"object": "embedding", "index": index, "embedding": wire} for index in range(len(several))]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    return {"object": "list", "model": "far-2026", "data": data, "usage": usage}
