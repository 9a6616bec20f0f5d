"""The response object and the items of its output, as the OpenAI SDKs read them."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..wire import dumps
from .form import ResponsesRequest

Item = dict[str, Any]

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def new_id(kind: str) -> str:
    """Such as `resp_6e0f...`: an id that nobody guesses, for it opens a conversation."""
    return f"{kind}_{uuid.uuid4().hex}"


@dataclass(slots=True, kw_only=True)
class ResponseObject:
    """One response while it is made. `model` and `usage` are the chat completion's, once it has told them."""

    request: ResponsesRequest
    id: str = field(default_factory=lambda: new_id("resp"))
    created_at: int = field(default_factory=lambda: int(time.time()))
    model: str = ""
    status: str = "in_progress"
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None
    report: Any = None

    def finished(self, finish_reason: object) -> None:
        """Set how it ended, from a chat's finish_reason."""
        self.reason = _INCOMPLETE.get(finish_reason) if isinstance(finish_reason, str) else None
        self.status = "incomplete" if self.reason else "completed"

    def to_wire(self, output: Sequence[Item]) -> dict[str, Any]:
        """The object `response`."""
        asked = self.request
        wire: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": self.status,
            "background": False,
            "error": self.error,
            "incomplete_details": {"reason": self.reason} if self.reason else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "model": self.model or asked.model,
            "output": list(output),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort, "summary": asked.reasoning.summary},
            "store": asked.store,
            "temperature": asked.temperature,
            "text": asked.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": _as_given(asked.tool_choice),
            "tools": [tool.model_dump() for tool in asked.tools],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": asked.truncation,
            "usage": self.usage,
            "metadata": asked.metadata,
        }
        if self.status == "completed":
            wire["completed_at"] = int(time.time())
        return wire if self.report is None else {**wire, "promptsluice": self.report}


def _as_given(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump()


def output_of(message: Mapping[str, Any], *, logprobs: Any, status: str) -> list[Item]:
    """The items of a whole chat message: what was thought, what was said, which functions are asked for.

    `status` is the last one's; those before it are whole.
    """
    items: list[Item] = []
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought:
        items.append(reasoning_item(thought))
    text, refusal = message.get("content"), message.get("refusal")
    calls = message.get("tool_calls") or ()
    parts: list[Item] = []
    if text or not (refusal or calls):
        parts.append(text_part(text if isinstance(text, str) else "", logprobs=logprobs_of(logprobs)))
    if isinstance(refusal, str) and refusal:
        parts.append(refusal_part(refusal))
    if parts:
        items.append(message_item(parts))
    for call in calls:
        function = call["function"]
        items.append(call_item(str(call.get("id") or new_id("call")), str(function["name"]), arguments_of(function)))
    items[-1]["status"] = status
    return items


def arguments_of(function: Mapping[str, Any]) -> str:
    """A call's arguments, or a piece of them, as text; some servers give the object itself."""
    given = function.get("arguments")
    return given if isinstance(given, str) else "" if given is None else dumps(given).decode()


def message_item(parts: list[Item], *, status: str = "completed") -> Item:
    return {"id": new_id("msg"), "type": "message", "status": status, "role": "assistant", "content": parts}


def text_part(text: str, *, logprobs: Sequence[Item] = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def refusal_part(text: str) -> Item:
    return {"type": "refusal", "refusal": text}


def reasoning_item(text: str, *, status: str = "completed") -> Item:
    """What a model thought, as far as its server tells it."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": new_id("rs"), "type": "reasoning", "status": status, "summary": [], "content": content}


def call_item(call_id: str, name: str, arguments: str, *, status: str = "completed") -> Item:
    return {
        "id": new_id("fc"),
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def logprobs_of(logprobs: Any) -> list[Item]:
    """A chat's log-probabilities: its entries are those of an output text."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return list(content) if isinstance(content, list) else []


def usage_of(usage: Any) -> dict[str, Any] | None:
    """A chat's usage as a response has it; None where an upstream tells none."""
    if not isinstance(usage, Mapping):
        return None
    put_in, put_out = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    told_in, told_out = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return {
        "input_tokens": put_in,
        "input_tokens_details": {
            "cached_tokens": _count(told_in, "cached_tokens"),
            "cache_write_tokens": _count(told_in, "cache_write_tokens"),
        },
        "output_tokens": put_out,
        "output_tokens_details": {"reasoning_tokens": _count(told_out, "reasoning_tokens")},
        "total_tokens": put_in + put_out,
    }


def _count(holder: Any, name: str) -> int:
    value = holder.get(name) if isinstance(holder, Mapping) else None
    return value if isinstance(value, int) else 0


def spoken(output: Sequence[Item]) -> dict[str, Any]:
    """The output as the one chat message that the next turn follows."""
    texts = [part for item in output if item["type"] == "message" for part in item["content"]]
    calls = [
        {"id": item["call_id"], "type": "function", "function": {k: item[k] for k in ("name", "arguments")}}
        for item in output
        if item["type"] == "function_call"
    ]
    text = "".join(part.get("text") or part.get("refusal") or "" for part in texts)
    return {"role": "assistant", "content": text or (None if calls else ""), **({"tool_calls": calls} if calls else {})}
