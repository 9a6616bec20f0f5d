"""OpenAI's Responses API: the body is the form that reads it, the answer is kept by hand."""

from ..responses.form import ResponsesRequest
from .kinds import COUNT, OBJECT, TEXT, WHOLE, YES_NO, Schema
from .schema import Operation, const, fields_of, form_of, many, or_null, record, ref

_BODY = form_of(ResponsesRequest)
_BODY["properties"] = {**fields_of(_BODY), "model": ref("Model"), "input": _BODY["properties"]["input"]}

SCHEMAS: dict[str, Schema] = {
    "ResponsesRequest": _BODY,
    "Response": record(
        {
            "id": TEXT,
            "object": const("response"),
            "created_at": WHOLE,
            "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
            "error": or_null(OBJECT),
            "incomplete_details": or_null(record({"reason": TEXT})),
            "instructions": or_null(TEXT),
            "model": TEXT,
            "output": many(
                record({"id": TEXT, "type": {"enum": ["message", "function_call", "reasoning"]}, "status": TEXT})
            ),
            "parallel_tool_calls": YES_NO,
            "previous_response_id": or_null(TEXT),
            "tools": many(OBJECT),
            "metadata": {"type": "object", "additionalProperties": TEXT},
            "usage": or_null(record({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})),
        },
        {"promptsluice": ref("Report")},
    ),
}
OPERATIONS: dict[str, Operation] = {
    "POST /v1/responses": Operation(tag="OpenAI", body=ref("ResponsesRequest"), answer=ref("Response"), streamed=True),
    "GET /v1/responses/{response_id}": Operation(tag="OpenAI", answer=ref("Response")),
    "DELETE /v1/responses/{response_id}": Operation(
        tag="OpenAI", answer=record({"id": TEXT, "object": const("response"), "deleted": YES_NO})
    ),
}
