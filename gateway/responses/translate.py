"""A Responses request as the body of a chat completion, and errors about that in the client's names of fields."""

from collections.abc import Sequence
from typing import Any

from ...prompt import PromptsluiceError
from ..wire import dumps
from .form import AllowedTools, FunctionChoice, FunctionTool, ResponsesRequest, TextFormat
from .items import Message

# A chat's field, and what a client of the Responses API calls it; the longest name first.
_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("messages", "input"),
)


def chat_body(request: ResponsesRequest, messages: Sequence[Message]) -> bytes:
    """The chat completion that answers a request, given the whole conversation but its instructions."""
    said = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    body: dict[str, Any] = {
        **request.others,
        "model": request.model,
        "messages": [*said, *messages],
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort,
        "verbosity": request.text.verbosity,
        "response_format": _format(request.text.format),
        **_tools(request),
    }
    if request.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return dumps({name: value for name, value in body.items() if value is not None})


def _format(asked: TextFormat) -> dict[str, Any] | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": asked.name or "answer", "schema": asked.schema_}
    more = {"description": asked.description, "strict": asked.strict}
    return {"type": "json_schema", "json_schema": schema | {k: v for k, v in more.items() if v is not None}}


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    if not request.tools:
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in request.tools]}
    if "tool_choice" in request.model_fields_set:
        fields["tool_choice"] = _choice(request.tool_choice)
    if "parallel_tool_calls" in request.model_fields_set:
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    return fields


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _choice(choice: str | FunctionChoice | AllowedTools) -> Any:
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedTools):
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": [_choice(tool) for tool in choice.tools]},
        }
    return choice


def rename_fields(error: PromptsluiceError) -> None:
    """Have an error speak of the fields that the client sent."""
    for chat, ours in _NAMES:
        if error.param is not None and error.param.startswith(chat):
            error.param = ours if chat == "messages" else error.param.replace(chat, ours, 1)
            error.message = error.message.replace(chat, ours)
            return
