"""What structured output costs: compiling, a mask and its application for each token, and whole decode steps.

Run: python benchmarks/grammar.py [--model smollm2-135m-instruct] [--batch 1 8] [--steps 40] [--threads 1]

Masks are timed by following texts that the model itself wrote within the grammar. Steps of two engines, one with free
and one with constrained requests of the same lengths, run in turns in one process; the ratio is the median over pairs.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from promptsluice.backend_engine.engine import Engine
from promptsluice.backend_engine.grammar import Grammar
from promptsluice.backend_engine.grammar.compiler import CompiledGrammar
from promptsluice.backend_engine.grammar.filling import Masks
from promptsluice.backend_engine.hub import pull
from promptsluice.backend_engine.loader import LoadedModel, load_model
from promptsluice.backend_engine.masks import masked
from promptsluice.backend_engine.options import EngineOptions
from promptsluice.backend_engine.types import Delta, GenerationRequest, Result, SamplingParams
from promptsluice.prompt.errors import PromptsluiceError
from rich.console import Console
from rich.table import Table

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "role": {"enum": ["admin", "author", "reader"]},
        "since": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "tags", "role"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
GRAMMARS = {
    "json_object": Grammar.json_object(),
    "person": Grammar.json_schema(PERSON),
    "recursive": Grammar.json_schema(TREE),
    "regex": Grammar.regex(r"[A-Z][a-z]+( [a-z]+){3,40}\. \d{4}-\d{2}-\d{2}"),
}
# Long enough that no request ends while steps are timed.
ENDLESS = Grammar.json_schema({"type": "string", "minLength": 100_000})
PROMPT = "Describe a person as JSON."


class Written:
    """A sink that keeps the ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def delta(self, delta: Delta) -> None:
        self.ids += delta.token_ids

    def done(self, result: Result) -> None:
        """Only the ids count."""

    def failed(self, error: PromptsluiceError) -> None:
        raise SystemExit(f"a request failed: {error}")


def timed(job: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds and the result."""
    began = time.perf_counter()
    result = job()
    return 1000 * (time.perf_counter() - began), result


def request(model: LoadedModel, grammar: CompiledGrammar | None, *, tokens: int, seed: int) -> GenerationRequest:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode_chat([{"role": "user", "content": f"{PROMPT} ({seed})"}]).ids
    sampling = SamplingParams(temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(ids=ids, sampling=sampling, grammar=grammar)


def follow(engine: Engine, grammar: CompiledGrammar, ids: list[int]) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each mask, its application to a row of logits, and each token's acceptance."""
    vocab = engine.model.spec.vocab
    masks, matcher = Masks(rows=1, vocab=vocab, device=torch.device("cpu")), grammar.matcher()
    logits, filled, applied, accepted = torch.randn(1, vocab), [], [], []
    for token in ids:
        spent, mask = timed(lambda: masks.of([matcher]))
        filled.append(spent)
        applied.append(timed(lambda mask=mask: masked(logits, mask))[0])
        accepted.append(timed(lambda token=token: matcher.accept(token))[0])
    return filled, applied, accepted


def masks_table(model: LoadedModel) -> Table:
    table = Table("grammar", "compile ms", "again ms", "tokens", "mask ms p50", "p99", "max", "apply ms", "accept ms")
    engine = Engine(model)
    engine.grammars.compile(Grammar.regex("the vocabulary is indexed by the first one"))
    for name, grammar in GRAMMARS.items():
        spent, compiled = timed(lambda grammar=grammar: engine.grammars.compile(grammar))
        again, _ = timed(lambda grammar=grammar: engine.grammars.compile(grammar))
        sinks = [Written() for _ in range(3)]
        for seed, sink in enumerate(sinks):
            engine.add(request(model, compiled, tokens=100, seed=seed), sink)
        while engine.has_work:
            engine.step()
        parts = [follow(engine, compiled, sink.ids) for sink in sinks]
        filled, applied, accepted = ([one for part in parts for one in part[kind]] for kind in range(3))
        p99 = statistics.quantiles(filled, n=100)[98]
        figures = (statistics.median(filled), p99, max(filled), statistics.median(applied), statistics.median(accepted))
        table.add_row(name, f"{spent:.1f}", f"{again:.3f}", str(len(filled)), *(f"{figure:.3f}" for figure in figures))
    return table


def stepping(model: LoadedModel, batch: int, *, constrained: bool, steps: int) -> Engine:
    """An engine whose requests are all prefilled."""
    engine = Engine(model, options=EngineOptions(kv_bytes=1 << 28))
    grammar = engine.grammars.compile(ENDLESS) if constrained else None
    for seed in range(batch):
        engine.add(request(model, grammar, tokens=steps + 50, seed=seed), Written())
    while engine.stats().generated_tokens < 3 * batch:
        engine.step()
    return engine


def steps_table(model: LoadedModel, batches: list[int], steps: int) -> Table:
    table = Table("batch", "free ms/step", "constrained ms/step", "ratio")
    for batch in batches:
        free, bound = (stepping(model, batch, constrained=way, steps=steps) for way in (False, True))
        pairs = [(timed(free.step)[0], timed(bound.step)[0]) for _ in range(steps)]
        medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
        ratio = statistics.median(after / before for before, after in pairs)
        table.add_row(str(batch), f"{medians[0]:.2f}", f"{medians[1]:.2f}", f"{ratio:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(pull(options.model), dtype="float32")
    console = Console(width=110)
    console.print(f"{options.model}, {options.threads} threads, {platform.machine()} {platform.processor()}")
    console.print(f"vocabulary indexed in {timed(lambda: Engine(model).grammars.compile(GRAMMARS['regex']))[0]:.0f} ms")
    console.print(masks_table(model))
    console.print(steps_table(model, options.batch, options.steps))


if __name__ == "__main__":
    main()
