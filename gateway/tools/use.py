"""A request's tools on a model: what its answer is restricted to, and how the calls are read out of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...backend_engine.grammar import Grammar
from ...backend_engine.grammar.lark import json_object, literal, token
from ...prompt import BadRequest
from .dialects import Dialect, dialect_of
from .offer import Function, Offer
from .parser import ToolParser

SpecialToken = Callable[[str], int | None]
"""The id of the special token of a text, None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """An offer, in the dialect of the model that it is made to."""

    offer: Offer
    dialect: Dialect

    @classmethod
    def of(cls, offer: Offer | None, template: str) -> "ToolUse | None":
        """None where nothing is offered, and for a template whose calls cannot be read: then they stay text.

        BadRequest where a call is asked for that could not be read.
        """
        dialect = dialect_of(template)
        if offer is not None and dialect is not None:
            return cls(offer=offer, dialect=dialect)
        if offer is not None and offer.forced and "tools" in template:
            message = "no call can be forced: how this model writes tool calls is not known here"
            raise BadRequest(message, param="tool_choice", code="unsupported_value")
        return None

    def reader(self) -> ToolParser:
        """For one answer."""
        return ToolParser(self.dialect, [function.name for function in self.offer.functions], most=self.offer.most)

    @property
    def stops(self) -> Sequence[str]:
        """Where an answer that is not restricted ends, beyond the model's own end."""
        return (self.dialect.closing,) if self.offer.most == 1 and self.dialect.closing else ()

    def grammar(self, special: SpecialToken) -> Grammar:
        """Nothing but calls, each with the arguments that its function takes, written as the templates write them."""
        dialect, functions = self.dialect, self.offer.functions
        opening, closing = (_mark(text, special) for text in (dialect.opening, dialect.closing))
        pad = [literal(dialect.pad)] if dialect.pad else []
        one = "call" if dialect.listed else " ".join([*opening, *pad, "call", *pad, *closing])
        more = self.offer.most is None and dialect.parallel
        calls = f"{one} ({literal(dialect.between)} {one})*" if more else one
        start = " ".join([*opening, '"["', calls, '"]"']) if dialect.listed else calls
        rules = [f"start: {start}", "call: " + " | ".join(f"f{place}" for place in range(len(functions)))]
        rules += [_rules(place, function, dialect) for place, function in enumerate(functions)]
        return Grammar.lark("\n".join(rules), param="tools")


def _mark(text: str, special: SpecialToken) -> list[str]:
    if not text:
        return []
    found = special(text)
    return [literal(text) if found is None else token(found)]


def _rules(place: int, function: Function, dialect: Dialect) -> str:
    head = f'{{"name": {json.dumps(function.name)}, "{dialect.arguments}": '
    arguments = json_object(function.schema, param=function.param)
    return f'f{place}: {literal(head)} a{place} "}}"\na{place}: {arguments}'
