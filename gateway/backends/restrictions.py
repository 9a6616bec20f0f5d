"""What a request restricts its text to, compiled by workers of its own: one that takes long delays no others."""

from typing import TYPE_CHECKING

from ...prompt import BadRequest
from ..parameters import Sampling
from ..tools.use import ToolUse
from ..workers import Workers

if TYPE_CHECKING:
    from ...backend_engine.grammar.compiler import CompiledGrammar
    from .engine_room import EngineRoom

_COMPILE_S = 30.0


class Restrictions:
    """Compiles the grammars of requests, each within `_COMPILE_S`."""

    def __init__(self) -> None:
        self._workers = Workers("grammar", threads=2, waiting=64)

    def close(self) -> None:
        """Drop what waits."""
        self._workers.close()

    async def compiled(
        self, room: "EngineRoom", parameters: Sampling, tools: ToolUse | None = None
    ) -> "CompiledGrammar | None":
        """The grammar of the calls that are forced, or of the format that is asked for; None for free text.

        BadRequest for what cannot be had, and for both at once.
        """
        forced = tools if tools is not None and tools.offer.forced else None
        if forced is None and not parameters.structured:
            return None
        if forced is not None and parameters.structured:
            raise BadRequest("a forced call cannot be combined with another format", param="tool_choice")

        def compiled() -> "CompiledGrammar":
            return room.compile(forced.grammar(room.tokenizer.special_token) if forced else parameters.grammar())

        try:
            return await self._workers.run(compiled, timeout_s=_COMPILE_S)
        except TimeoutError as error:
            message = f"compiling the grammar takes longer than {_COMPILE_S:g} seconds; make it simpler"
            raise BadRequest(message, param="tools" if forced else "response_format") from error
