"""Do tool schemas and the calls in a history come through compression byte for byte?

Run: python benchmarks/compress_tool_calls.py DATA [--samples 100] [--ours perplexity extractive balanced lossless ...]
     [--rates 0.5 0.33]

DATA has bfcl. Each sample is a conversation of BFCL's multi-turn set: the tools in the request's field, a tool result
that lists their schemas, one a line, the user's turns, and the right calls of each turn with a result. It is compressed
as a whole, every kind of text that may be rewritten. For each compressor: how many schemas and calls in the request's
fields, and how many schemas within the result's text, are what they were, byte for byte, and what is left of the
tokens. (`lossless`, and `balanced` with it, write the JSON of a tool result without its white space: the same JSON.)
"""

import ast
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress_subjects import Machinery, Ours, common_options, heading, opened, steps_of
from promptsluice.prompt import Prompt
from rich.console import Console
from rich.progress import track
from rich.table import Table

_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


@dataclass(frozen=True)
class Sample:
    """A request with tools; `schemas` as they stand in the text of a tool result."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    schemas: Sequence[str]


@dataclass
class Kept:
    """What came through, of how many, and the shares of the tokens that are left."""

    fields: int = 0
    of_fields: int = 0
    texts: int = 0
    of_texts: int = 0
    same: int = 0

    def add(self, sample: Sample, after: Prompt) -> None:
        pairs = [(sample.tools, after.body["tools"])]
        pairs += [
            (a.get("tool_calls"), b.get("tool_calls")) for a, b in zip(sample.messages, after.messages, strict=True)
        ]
        wanted = [pair for pair in pairs if pair[0]]
        self.fields += sum(json.dumps(before) == json.dumps(now) for before, now in wanted)
        self.of_fields += len(wanted)
        text = "\n".join(str(message["content"]) for message in after.messages if message["role"] == "tool")
        self.texts += sum(schema in text for schema in sample.schemas)
        self.same += sum(_dense(schema) in _dense(text) for schema in sample.schemas)
        self.of_texts += len(sample.schemas)


def main() -> None:
    parser = common_options(__doc__ or "", compared=["perplexity", "extractive", "balanced", "lossless"], rows=False)
    parser.add_argument("--samples", type=int, default=100)
    options = parser.parse_args()
    drawn = samples(options.data / "bfcl", count=options.samples)
    console = Console(width=140)
    table = Table()
    for column in ("", "asked", "left of the tokens", "in fields", "schemas in text", "but for spaces"):
        table.add_column(column, justify="right" if column else "left")
    with opened(options) as (machinery, _):
        console.print(f"{heading(options)}, {len(drawn)} conversations")
        for name in options.ours:
            for rate in options.rates:
                kept, rates = Kept(), list[float]()
                for sample in track(drawn, description=f"{name} {rate}"):
                    before = Prompt.from_messages(sample.messages, tools=sample.tools)
                    after = Ours(name, machinery, steps_of(name)).prompt(before, question=before.question, rate=rate)[0]
                    kept.add(sample, after)
                    rates.append(_tokens(machinery, after) / _tokens(machinery, before))
                table.add_row(
                    name,
                    f"{rate:.2f}",
                    f"{statistics.median(rates):.3f}",
                    f"{kept.fields}/{kept.of_fields}",
                    f"{kept.texts}/{kept.of_texts}",
                    f"{kept.same}/{kept.of_texts}",
                )
    console.print(table)


def samples(folder: Path, *, count: int, seed: int = 0) -> list[Sample]:
    """The first `count` of a seeded order."""
    called = {row["id"]: row["ground_truth"] for row in _rows(folder / "possible_answer/BFCL_v4_multi_turn_base.json")}
    rows = list(_rows(folder / "BFCL_v4_multi_turn_base.json"))
    random.Random(seed).shuffle(rows)
    return [_sample(row, called[row["id"]], folder) for row in rows[:count]]


def _sample(row: Mapping[str, Any], turns: Sequence[Sequence[str]], folder: Path) -> Sample:
    functions = [
        function
        for name in row["involved_classes"]
        for function in _rows(folder / "multi_turn_func_doc" / f"{_FILES[name]}.json")
    ]
    schemas = [json.dumps(function) for function in functions]
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": "Use the tools."}]
    messages += _called([("list_tools", {})], "t", ["\n".join(schemas)])
    for n, (asked, calls) in enumerate(zip(row["question"], turns, strict=True)):
        messages += asked
        told = [json.dumps(row["initial_config"], indent=2)] if n == 0 else []
        parsed = [_parsed(call) for call in calls]
        results = [*told, *("The command was carried out and nothing went wrong." for _ in parsed)][: len(parsed)]
        messages += _called(parsed, str(n), results) if parsed else []
    messages.append({"role": "user", "content": "Tell me what was done, and what is left to do."})
    return Sample(messages, [{"type": "function", "function": function} for function in functions], schemas)


def _called(calls: Sequence[tuple[str, Any]], turn: str, results: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """The assistant's message with calls, and their results."""
    ids = [f"call_{turn}_{n}" for n in range(len(calls))]
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    made = [{"id": own, "type": "function", "function": one} for own, one in zip(ids, functions, strict=True)]
    yield {"role": "assistant", "content": None, "tool_calls": made}
    for own, result in zip(ids, results, strict=True):
        yield {"role": "tool", "tool_call_id": own, "content": result}


def _parsed(call: str) -> tuple[str, dict[str, Any]]:
    """BFCL writes calls as Python: the function's name and its arguments."""
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call), f"{call} is no call"
    given = {f"arg{n}": ast.literal_eval(one) for n, one in enumerate(node.args)}
    return ast.unparse(node.func), {**given, **{str(one.arg): ast.literal_eval(one.value) for one in node.keywords}}


def _tokens(machinery: Machinery, prompt: Prompt) -> int:
    return sum(machinery.count(segment.text) for segment in prompt.segments)


def _dense(text: str) -> str:
    return "".join(text.split())


def _rows(path: Path) -> Iterator[Any]:
    return (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
