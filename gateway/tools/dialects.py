"""How families of models write tool calls in their text. Which one a model knows is read off its chat template."""

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

_ALPHANUMERIC = string.ascii_letters + string.digits


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Mistral's templates refuse any other form."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A call is a JSON object with the members `name` and, as `arguments` says it is called, its arguments.

    `opening` stands before a call, or, where calls are `listed`, before a list of them; where it is empty, an answer
    that begins with an object is a call. `closing` stands behind a call, `between` between two of them. `pad` is what
    templates put inside the marks. `parallel`: the family's templates take several calls in one turn.
    """

    opening: str
    closing: str
    between: str
    arguments: str = "arguments"
    pad: str = ""
    listed: bool = False
    parallel: bool = True
    new_id: Callable[[], str] = _openai_id


HERMES = Dialect(opening="<tool_call>", closing="</tool_call>", between="\n", pad="\n")
"""Hermes, Qwen2.5, Qwen3, SmolLM3: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`."""
MISTRAL = Dialect(opening="[TOOL_CALLS]", closing="", between=", ", listed=True, new_id=_mistral_id)
"""Mistral's tokenizers up to v7: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""
LLAMA3 = Dialect(opening="", closing="", between="; ", arguments="parameters", parallel=False)
"""Llama 3.1 and later: `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`."""


def dialect_of(template: str) -> Dialect | None:
    """The dialect that a chat template with tools teaches; None where it is none of ours."""
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None
