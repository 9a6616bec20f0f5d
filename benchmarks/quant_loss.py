"""What fewer bits cost: the next-token distributions of rounded models against the float32 ones, on real text.

Run: python benchmarks/quant_loss.py [--model smollm2-135m-instruct] [--texts examples/data] [--windows 24]

Windows of 512 tokens are cut evenly from the texts; all models read the same ones in one process. KL is
`sum p32 * (log p32 - log p)` in nats, over all positions of a window but the first. `int8` is the CPU's own. What runs
on a GPU is computed here in float32 with the same roundings: of weights, with `activations` of the rows of all
products in layers as well, as long prefills have them. `shuffled` int4 groups inputs in random order, which is the same
as renumbering the hidden dimensions: a model that came from a 4-bit file, whose groups are others, must not gain by
fitting its own grid. `kv` rounds keys and values; `moved` computes the first half of each window by itself, reads it
from the pool, turns it by 3,000 positions and back, storing it in between, and compares the second half.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from promptsluice.backend_engine import KVPool, LoadedModel, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from promptsluice.backend_engine.hub import resolve
from promptsluice.backend_engine.linear import Forms, Linear, PlainLinear, PlainTable, Table
from promptsluice.backend_engine.model import Decoder
from promptsluice.backend_engine.quant import quantized_rows
from promptsluice.backend_engine.quantization.rounding import fp8_rows, int4_groups, int4_widened
from promptsluice.backend_engine.weights import SafetensorsSource, load_weights
from promptsluice.kv_reuse import repositioned
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor

WINDOW, HALF, ROWS = 512, 256, 64
FAR = 3000
SUFFIXES = (".md", ".txt", ".py", ".jsonl")
Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RoundedRows:
    """A product whose rows are rounded to e4m3 as the weights are."""

    weight: Tensor
    bias: Tensor | None
    nbytes: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(by_rows(fp8_rows, x), self.weight, self.bias)


def by_rows(rounding: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor) -> Tensor:
    values, scales = rounding(weight)
    return values.float() * scales[:, None]


def int4(weight: Tensor) -> Tensor:
    return int4_widened(*int4_groups(weight))


def shuffled_int4(weight: Tensor) -> Tensor:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    return int4(weight[:, order])[:, order.argsort()]


def int8(weight: Tensor) -> Tensor:
    return by_rows(quantized_rows, weight)


def fp8(weight: Tensor) -> Tensor:
    return by_rows(fp8_rows, weight)


def forms(rounding: Rounding, ends: Rounding = int8, *, activations: bool = False) -> Forms:
    """Matrices that are rounded and computed with in float32."""

    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        rounded = rounding(weight)
        return RoundedRows(rounded, bias) if activations else PlainLinear(rounded, bias)

    def both(embedding: Tensor, head: Tensor | None) -> tuple[Table, Linear]:
        table = ends(embedding)
        return PlainTable(table), PlainLinear(table if head is None else ends(head))

    return Forms(linear=linear, ends=both)


GPU = {
    "GPU int8": forms(int8),
    "GPU int4": forms(int4),
    "GPU int4 shuffled": forms(shuffled_int4),
    "GPU fp8": forms(fp8),
    "GPU fp8 activations": forms(fp8, activations=True),
}


@dataclass(frozen=True)
class Subject:
    """A model and how its keys and values are stored."""

    decoder: Decoder
    kv: torch.dtype = torch.float32
    moved: bool = False


KV = {
    f"kv {name}{', moved' * moved}": partial(Subject, kv=dtype, moved=moved)
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn))
    for moved in (False, True)
}


def windows(model: LoadedModel, folder: Path, count: int) -> list[list[int]]:
    assert model.tokenizer is not None, "the model has no tokenizer"
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    ids = [token for path in files for token in model.tokenizer.encode_plain(path.read_text(encoding="utf-8"))]
    whole = len(ids) // WINDOW
    if whole == 0:
        raise SystemExit(f"{folder}: no {WINDOW} tokens of text in files called *{', *'.join(SUFFIXES)}")
    chosen = range(0, whole, max(1, whole // count))
    return [ids[number * WINDOW : (number + 1) * WINDOW] for number in chosen][:count]


def hidden(subject: Subject, ids: list[int]) -> Tensor:
    """States of all rows but the first and the last, [WINDOW - 2, hidden]."""
    decoder = subject.decoder
    pool = KVPool(decoder.spec, pages=WINDOW // 16, dtype=subject.kv)
    states = []
    for rows in (range(HALF), range(HALF, WINDOW)) if subject.moved else (range(WINDOW),):
        logits = range(0 if rows.start else 1, len(rows) - (rows.stop == WINDOW))
        part = RequestRows(ids=[ids[row] for row in rows], indices=rows, pages=range(pool.pages), logits=logits)
        states.append(decoder.forward(build_batch([part], page_size=pool.page_size), pool).hidden)
        if subject.moved and rows.start == 0:
            turned(pool, decoder)
    return torch.cat(states)


def turned(pool: KVPool, decoder: Decoder) -> None:
    slots = torch.arange(HALF)
    for old, new in ((0, FAR), (FAR, 0)):
        pool.write_block(slots, repositioned(pool.read(slots), decoder.ropes, old=old, new=new))


@torch.inference_mode()
def compared(exact: Decoder, subject: Subject, ids: list[int]) -> tuple[Tensor, ...]:
    """Of one window: KL, whether the likeliest token agrees, and both models' loss, each [positions]."""
    subjects = (Subject(exact), subject)
    states = [hidden(one, ids) for one in subjects]
    parts, following = [], torch.tensor(ids[2:])[:, None]
    for start in range(HALF if subject.moved else 0, WINDOW - 2, ROWS):
        rows = slice(start, start + ROWS)
        a, b = (one.decoder.logits(state[rows]).log_softmax(-1) for one, state in zip(subjects, states, strict=True))
        losses = [-scores.gather(1, following[rows]).squeeze(1) for scores in (a, b)]
        parts.append(((a.exp() * (a - b)).sum(-1), (a.argmax(-1) == b.argmax(-1)).float(), *losses))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def subject_of(name: str, model: LoadedModel, folder: Path) -> Subject:
    if name == "int8":
        return Subject(load_model(folder, dtype="float32", quantize="int8").decoder)
    if name in KV:
        return KV[name](model.decoder)
    weights = load_weights(SafetensorsSource(folder), model.spec, dtype=torch.float32, forms=GPU[name])
    return Subject(Decoder(model.spec, weights))


def main() -> None:
    known = ["int8", *GPU, *KV]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--texts", type=Path, default=Path(__file__).parents[1] / "examples" / "data")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--only", nargs="*", choices=known, default=known)
    options = parser.parse_args()
    exact = load_model(options.model, dtype="float32")
    folder = resolve(options.model)
    chosen = windows(exact, options.texts, options.windows)
    console = Console(width=120)
    console.print(f"{options.model} against float32, {len(chosen)} windows of {WINDOW} tokens of {options.texts}")
    table = Grid("", "mean KL, nats", "median", "99th percentile", "same likeliest token", "perplexity")
    for name in options.only:
        subject = subject_of(name, exact, folder)
        columns = zip(*(compared(exact.decoder, subject, ids) for ids in chosen), strict=True)
        kl, same, before, after = (torch.cat(column) for column in columns)
        table.add_row(
            name, f"{kl.mean():.4f}", f"{kl.median():.4f}", f"{kl.quantile(0.99):.4f}", f"{same.mean():.1%}",
            f"{before.mean().exp():.3f} -> {after.mean().exp():.3f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
