"""Anthropic's Messages API."""

from .kinds import COUNT, OBJECT, TEXT, YES_NO, Schema
from .schema import Operation, const, either, many, or_null, record, ref

_BLOCK = record({"type": TEXT}, {"text": TEXT, "id": TEXT, "name": TEXT, "tool_use_id": TEXT})
_TOLD: dict[str, Schema] = {
    "system": or_null(either(TEXT, many(_BLOCK))),
    "tools": or_null(many(record({"name": TEXT}, {"type": TEXT, "description": TEXT, "input_schema": OBJECT}))),
    "tool_choice": or_null(record({"type": {"enum": ["auto", "any", "none", "tool"]}}, {"name": TEXT})),
}
_ASKED: dict[str, Schema] = {
    "model": ref("Model"),
    "messages": many(record({"role": {"enum": ["user", "assistant"]}, "content": either(TEXT, many(_BLOCK))}), least=1),
}

SCHEMAS: dict[str, Schema] = {
    "MessagesError": record(
        {"type": const("error"), "error": record({"type": TEXT, "message": TEXT})}, {"request_id": or_null(TEXT)}
    ),
    "MessagesRequest": record(
        {**_ASKED, "max_tokens": {"type": "integer", "minimum": 1}},
        {
            **_TOLD,
            "stream": or_null(YES_NO),
            "stop_sequences": or_null(many(TEXT)),
            "temperature": or_null({"type": "number", "minimum": 0, "maximum": 1}),
            "top_p": or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
            "top_k": or_null(COUNT),
            "metadata": or_null(record({}, {"user_id": or_null(TEXT)})),
            "output_config": or_null(OBJECT),
        },
    ),
    "CountRequest": record(_ASKED, _TOLD),
    "AnthropicMessage": record(
        {
            "id": TEXT,
            "type": const("message"),
            "role": const("assistant"),
            "model": TEXT,
            "content": many(_BLOCK),
            "stop_reason": or_null(TEXT),
            "stop_sequence": or_null(TEXT),
            "usage": record({"input_tokens": COUNT, "output_tokens": COUNT}),
        },
        {"promptsluice": ref("Report")},
    ),
}
OPERATIONS: dict[str, Operation] = {
    "POST /v1/messages": Operation(
        tag="Anthropic",
        body=ref("MessagesRequest"),
        answer=ref("AnthropicMessage"),
        streamed=True,
        error="MessagesError",
    ),
    "POST /v1/messages/count_tokens": Operation(
        tag="Anthropic", body=ref("CountRequest"), answer=record({"input_tokens": COUNT}), error="MessagesError"
    ),
}
