"""The body of POST /v1/responses: what it may say, and what of it cannot be honoured here.

Fields that are not named here (vLLM's extensions, a provider's own) go on to the chat completion as they are: the
embedded engine refuses by name what it does not know, an upstream decides for itself.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from ...prompt import BadRequest
from ...prompt.jsontext import decode_text, parse
from ..bodies import Body, bad_request

_PAIRS, _KEY, _VALUE = 16, 64, 512
_LOGPROBS = "message.output_text.logprobs"
# Parts of items that no answer here ever has: leaving them out is what including them means.
_INCLUDABLE = frozenset(
    {
        _LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)  # fmt: skip
_REFUSED = {
    "background": "answers are not made in the background; leave it out, or stream",
    "background_options": "answers are not made in the background",
    "conversation": "conversations are not kept here; use previous_response_id",
    "prompt": "prompt templates are not kept here; send instructions and input",
    "context_management": "what a prompt is shortened by is the policy's business here",
    "moderation": "there is no moderation here",
    "access_programs": "there are no access programs here",
    "image": "images are not made here",
}
_CHAT_ONLY = {
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format", "verbosity": "text.verbosity", "reasoning_effort": "reasoning.effort",
    "functions": "tools", "function_call": "tool_choice", "logprobs": f"include: [{_LOGPROBS!r}]",
    "n": "several requests", "modalities": "text",
}  # fmt: skip


class TextFormat(Body):
    """What the text has to be: `text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _together(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema goes with the type json_schema, and only with it")
        return self


class TextSettings(Body):
    """The field `text`."""

    format: TextFormat = TextFormat()
    verbosity: str | None = None


class Reasoning(Body):
    """The field `reasoning`. What a model thinks comes back whole where its server tells it; nobody sums it up."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class FunctionTool(Body):
    """A function that the model may ask for."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """A function that has to be called, or may be."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]


class AllowedTools(Body):
    """Some of the tools, of which one may (auto) or must (required) be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class StreamOptions(Body):
    """Obfuscation pads events against who counts bytes on the line; there is none."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Body):
    """One request, as it came."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1)]
    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextSettings = TextSettings()
    reasoning: Reasoning = Reasoning()
    tools: list[FunctionTool] = Field(default_factory=list[FunctionTool])
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    truncation: Literal["disabled"] = "disabled"
    include: list[str] = Field(default_factory=list[str])
    metadata: dict[str, str] = Field(default_factory=dict[str, str])

    @field_validator("tools", mode="before")
    @classmethod
    def _functions(cls, value: Any) -> Any:
        for place, tool in enumerate(value if isinstance(value, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind != "function":
                shown = repr(kind)[:60]
                raise ValueError(f"only tools of type 'function' can be served here; number {place} is {shown}")
        return value

    @field_validator("include")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        unknown = [one for one in value if one not in _INCLUDABLE]
        if unknown:
            raise ValueError(f"{unknown[0][:60]!r} is nothing that could be included")
        return value

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > _PAIRS or any(len(key) > _KEY or len(text) > _VALUE for key, text in value.items()):
            raise ValueError(f"may have {_PAIRS} pairs, keys of {_KEY} characters and values of {_VALUE}")
        return value

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in self.include or self.top_logprobs is not None

    @property
    def others(self) -> dict[str, Any]:
        """Fields that are not ours to read."""
        return dict(self.model_extra or {})


_SAID = {
    "reasoning": "reasoning takes effort, and of summaries only 'auto': what a model thinks is not summed up here",
    "truncation": "truncation must be 'disabled': what a prompt is shortened by is the policy's business here",
    "tool_choice": "tool_choice must be none, auto, required, a function, or allowed_tools of functions",
}


def read_request(raw: bytes, *, max_depth: int) -> ResponsesRequest:
    """Check a body; BadRequest names the first field at fault. A field that is null counts as absent."""
    body = parse(decode_text(raw), max_depth=max_depth)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    given = {name: value for name, value in body.items() if value is not None}
    for name, why in _REFUSED.items():
        if given.pop(name, False) is not False:
            raise BadRequest(f"{name}: {why}", param=name, code="unsupported_parameter")
    for name, ours in _CHAT_ONLY.items():
        if name in given:
            message = f"{name!r} is a field of chat completions; here it is {ours}"
            raise BadRequest(message, param=name, code="unsupported_parameter")
    try:
        return ResponsesRequest.model_validate(given)
    except ValidationError as error:
        raise bad_request(error, said=_SAID) from None
