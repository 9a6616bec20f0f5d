"""Chat Completions, legacy completions and what both share: usage, log-probabilities, sampling, errors.

Request fields are those that the gateway or the embedded engine reads, with the engine's bounds. An upstream gets
every other field, too, and has its own bounds.
"""

from ..parameters import ChatParameters
from ..text_parameters import TextParameters
from .kinds import COUNT, NUMBER, OBJECT, TEXT, WHOLE, YES_NO, Schema
from .schema import Operation, const, either, fields_of, form_of, many, or_null, record, ref

_IDS = many(COUNT, least=1)
_PROMPTS = either(TEXT, _IDS, many(TEXT, least=1), many(_IDS, least=1))
_CODE = either(TEXT, WHOLE)
_STRINGS = either(TEXT, many(TEXT))
_STREAMED: dict[str, Schema] = {
    "stream": or_null(YES_NO),
    "stream_options": or_null(record({}, {"include_usage": or_null(YES_NO)})),
    "stop": or_null(_STRINGS),
    "user": or_null(TEXT),
}
_CHAT = form_of(ChatParameters, prefix="Chat")
_TEXT = form_of(TextParameters, prefix="Text")
_TOLD_TOKEN = record({"token": TEXT, "logprob": NUMBER}, {"bytes": or_null(many(COUNT)), "top_logprobs": many(OBJECT)})
_COUNTED = ("tokens_in", "tokens_out", "retrieved", "pruned", "cached", "loaded", "reused", "recomputed")
_SIDE = ("side_prompt", "side_completion")
_ENDED: dict[str, Schema] = {"finish_reason": or_null(TEXT)}

SCHEMAS: dict[str, Schema] = {
    "Model": {"type": "string", "minLength": 1, "description": "A model's name, or `model:policy`."},
    # An upstream's own error comes as it came, perhaps without these two.
    "Error": record(
        {
            "error": record(
                {"message": TEXT, "type": TEXT}, {"param": or_null(TEXT), "code": or_null(either(TEXT, WHOLE))}
            )
        }
    ),
    "Usage": record(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        {"prompt_tokens_details": or_null(record({}, {"cached_tokens": or_null(COUNT)}))},
    ),
    "Report": record(
        {"policy": TEXT, "backend": TEXT, "reason": TEXT, "steps": many(OBJECT), "overhead_ms": NUMBER}
        | dict.fromkeys((*_COUNTED, *_SIDE), COUNT)
        | {"originals": many(TEXT), "kv_spans": many(OBJECT)},
        {"tiers": {"type": "object", "additionalProperties": COUNT}},
    ),
    "Message": record(
        {"role": TEXT},
        {
            "content": either(TEXT, many(record({"type": TEXT}, {"text": TEXT})), {"type": "null"}),
            "tool_calls": or_null(many(ref("ToolCall"))),
            "tool_call_id": or_null(TEXT),
            "name": or_null(TEXT),
        },
    ),
    "ToolCall": record({"function": record({"name": TEXT, "arguments": TEXT})}, {"id": TEXT, "type": TEXT}),
    "ChatTool": record(
        {"type": const("function"), "function": record({"name": TEXT}, {"description": TEXT, "parameters": OBJECT})}
    ),
    "ChatRequest": {
        **record(
            {"model": ref("Model"), "messages": many(ref("Message"), least=1)},
            {**fields_of(_CHAT), **_STREAMED, "tools": or_null(many(ref("ChatTool")))},
        ),
        "$defs": _CHAT["$defs"],
    },
    "ChatCompletion": record(
        {
            "id": TEXT,
            "object": const("chat.completion"),
            "created": WHOLE,
            "model": TEXT,
            "choices": many(
                record(
                    {
                        "index": COUNT,
                        "message": record({"role": const("assistant"), "content": or_null(TEXT)}),
                        **_ENDED,
                    },
                    {"logprobs": or_null(record({}, {"content": or_null(many(_TOLD_TOKEN))}))},
                )
            ),
        },
        {"usage": or_null(ref("Usage")), "promptsluice": ref("Report")},
    ),
    "CompletionRequest": {
        **record(
            {"model": ref("Model")},
            {**fields_of(_TEXT), **_STREAMED, "prompt": _PROMPTS},
        ),
        "required": ["model", "prompt"],
        "$defs": _TEXT["$defs"],
    },
    "Completion": record(
        {
            "id": TEXT,
            "object": const("text_completion"),
            "created": WHOLE,
            "model": TEXT,
            "choices": many(record({"index": COUNT, "text": TEXT, **_ENDED}, {"logprobs": or_null(OBJECT)})),
        },
        {"usage": or_null(ref("Usage")), "promptsluice": ref("Report")},
    ),
    "Compression": record(
        {
            "object": const("compression"),
            "model": TEXT,
            "changed": YES_NO,
            "messages": many(record({"role": TEXT})),
            "segments": many(
                record(
                    {
                        "path": many(either(TEXT, COUNT)),
                        "role": TEXT,
                        "kind": TEXT,
                        "source": or_null(TEXT),
                        "original": or_null(TEXT),
                        "text": TEXT,
                        "tokens_before": COUNT,
                        "tokens_after": COUNT,
                        "action": TEXT,
                        "uses": many(TEXT),
                        "reason": TEXT,
                    }
                )
            ),
            "promptsluice": ref("Report"),
        }
    ),
}
OPERATIONS: dict[str, Operation] = {
    "POST /v1/chat/completions": Operation(
        tag="OpenAI", body=ref("ChatRequest"), answer=ref("ChatCompletion"), streamed=True
    ),
    "POST /v1/completions": Operation(
        tag="OpenAI", body=ref("CompletionRequest"), answer=ref("Completion"), streamed=True
    ),
    "POST /v1/compress": Operation(tag="House", body=ref("ChatRequest"), answer=ref("Compression")),
}
