"""What 8-bit weights cost: the next-token distributions of a quantized model against the float32 ones, on real text.

Run: python benchmarks/quant_loss.py [--model smollm2-135m-instruct] [--texts examples/data] [--windows 24]

Windows of 512 tokens are cut evenly from the texts; both models read the same ones in one process. KL is
`sum p32 * (log p32 - log p8)` in nats, over all positions of a window but the first.
"""

import argparse
from pathlib import Path

import torch
from promptsluice.backend_engine import KVPool, LoadedModel, load_model
from promptsluice.backend_engine.batch import RequestRows, build_batch
from torch import Tensor

WINDOW, ROWS = 512, 64
SUFFIXES = (".md", ".txt", ".py", ".jsonl")


def windows(model: LoadedModel, folder: Path, count: int) -> list[list[int]]:
    assert model.tokenizer is not None, "the model has no tokenizer"
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    ids = [token for path in files for token in model.tokenizer.encode_plain(path.read_text(encoding="utf-8"))]
    whole = len(ids) // WINDOW
    if whole == 0:
        raise SystemExit(f"{folder}: no {WINDOW} tokens of text in files called *{', *'.join(SUFFIXES)}")
    chosen = range(0, whole, max(1, whole // count))
    return [ids[number * WINDOW : (number + 1) * WINDOW] for number in chosen][:count]


def hidden(model: LoadedModel, pool: KVPool, ids: list[int]) -> Tensor:
    part = RequestRows(ids=ids, indices=range(WINDOW), pages=range(pool.pages), logits=range(1, WINDOW - 1))
    return model.decoder.forward(build_batch([part], page_size=pool.page_size), pool).hidden


@torch.inference_mode()
def compared(exact: LoadedModel, rounded: LoadedModel, ids: list[int], pools: list[KVPool]) -> tuple[Tensor, ...]:
    """Of one window: KL, whether the likeliest token agrees, and both models' loss, each [positions]."""
    states = [hidden(model, pool, ids) for model, pool in zip((exact, rounded), pools, strict=True)]
    parts, following = [], torch.tensor(ids[2:])[:, None]
    for start in range(0, WINDOW - 2, ROWS):
        rows = slice(start, start + ROWS)
        a, b = (
            model.decoder.logits(state[rows]).log_softmax(-1)
            for model, state in zip((exact, rounded), states, strict=True)
        )
        losses = [-scores.gather(1, following[rows]).squeeze(1) for scores in (a, b)]
        parts.append(((a.exp() * (a - b)).sum(-1), (a.argmax(-1) == b.argmax(-1)).float(), *losses))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--texts", type=Path, default=Path(__file__).parents[1] / "examples" / "data")
    parser.add_argument("--windows", type=int, default=24)
    options = parser.parse_args()
    exact = load_model(options.model, dtype="float32")
    rounded = load_model(options.model, dtype="float32", quantize="int8")
    pools = [KVPool(model.spec, pages=WINDOW // 16) for model in (exact, rounded)]
    chosen = windows(exact, options.texts, options.windows)
    columns = zip(*(compared(exact, rounded, ids, pools) for ids in chosen), strict=True)
    kl, same, before, after = (torch.cat(column) for column in columns)
    print(f"{options.model}, int8 against float32, {len(chosen)} windows of {WINDOW} tokens of {options.texts}")
    print(f"KL nats: mean {kl.mean():.4f}, median {kl.median():.4f}, 99th percentile {kl.quantile(0.99):.4f}")
    print(f"same likeliest token: {same.mean():.1%}")
    print(f"perplexity: {before.mean().exp():.3f} -> {after.mean().exp():.3f}")


if __name__ == "__main__":
    main()
