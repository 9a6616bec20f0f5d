"""Which functions a request lets the model call, and whether it has to: its tools, and what it says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ...prompt import BadRequest
from ..bodies import Body

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionName(Body):
    """A function by its name."""

    name: Annotated[str, Field(min_length=1)]


class FunctionChoice(Body):
    """One function of the request's tools."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Some of the tools, of which one may (auto) or must (required) be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


class AllowedChoice(Body):
    """OpenAI's wrapper of that."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that may be called. `param` is where its JSON schema stands in the request."""

    name: str
    schema: Any
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The functions that may be called. `forced`: one has to be. `most`: how many calls there may be at a time."""

    functions: tuple[Function, ...]
    forced: bool
    most: int | None


def offer_of(tools: Sequence[Any], choice: ToolChoice, *, parallel: bool) -> Offer | None:
    """None where nothing may be called. BadRequest names what is wrong about the tools or the choice."""
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if not tools:
        raise BadRequest(
            "tool_choice asks for a call, but there are no tools", param="tool_choice", code="invalid_value"
        )
    functions = {function.name: function for function in map(_function, range(len(tools)), tools)}
    named = _named(choice)
    for name in named or ():
        if name not in functions:
            message = f"tool_choice names {name[:80]!r}, which is none of the tools"
            raise BadRequest(message, param="tool_choice", code="invalid_value")
    forced = choice == "required" or isinstance(choice, FunctionChoice)
    if isinstance(choice, AllowedChoice):
        forced = choice.allowed_tools.mode == "required"
    return Offer(
        functions=tuple(functions[name] for name in functions if named is None or name in named),
        forced=forced,
        most=None if parallel and not isinstance(choice, FunctionChoice) else 1,
    )


def _function(place: int, tool: Any) -> Function:
    where = f"tools[{place}]"
    if not isinstance(tool, Mapping):
        raise BadRequest("each tool must be an object", param=where, code="invalid_value")
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        message = "only tools of the type 'function', with an object 'function', can be called here"
        raise BadRequest(message, param=where, code="unsupported_value")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise BadRequest("a function needs a name", param=f"{where}.function.name", code="invalid_value")
    return Function(
        name=name, schema=_NO_PARAMETERS if schema is None else schema, param=f"{where}.function.parameters"
    )


def _named(choice: ToolChoice) -> tuple[str, ...] | None:
    """The names in a choice; None where it names none."""
    if isinstance(choice, FunctionChoice):
        return (choice.function.name,)
    return (
        tuple(tool.function.name for tool in choice.allowed_tools.tools) if isinstance(choice, AllowedChoice) else None
    )
