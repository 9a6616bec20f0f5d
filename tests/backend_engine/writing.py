"""A small byte-level tokenizer, and generations at random within a grammar: whatever a model could be made to write."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from promptsluice.backend_engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from promptsluice.backend_engine.grammar.filling import Masks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 512
EOS = 2
_TEXTS = [
    '{"name": "Ada Lovelace", "age": 36, "tags": ["math", "engine"], "ok": true, "none": null}',
    '[{"kind": "circle", "radius": 1.5}, {"kind": "square", "side": -2e3}], "id": "a1b2-c3d4"',
    "2024-05-17T10:20:30Z the quick brown fox jumps over the lazy dog äöü 日本 😀 \n    \n\t",
]


@cache
def tiny_tokenizer() -> Tokenizer:
    """All bytes, common pairs of them, and three special tokens, the third of which ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


@dataclass(frozen=True)
class Indexed:
    """As the compiler takes a tokenizer."""

    backend: Tokenizer


def tiny_compiler(*, vocab: int = VOCAB, eos_ids: tuple[int, ...] = (EOS,), **options: int) -> GrammarCompiler:
    return GrammarCompiler(Indexed(tiny_tokenizer()), vocab=vocab, eos_ids=eos_ids, **options)


def allowed(mask: torch.Tensor) -> np.ndarray:
    """The packed rows [rows, words] as bool [rows, vocab]."""
    words = mask.cpu().numpy().view(np.uint32)
    return (words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool).reshape(len(words), -1)[:, :VOCAB]


def written(compiled: CompiledGrammar, seed: int, *, most: int = 600) -> tuple[str, bool]:
    """Text of random tokens within a grammar, and whether it came to its end.

    Tokens that can end something gain weight with time, or strings would never close.
    """
    tokenizer, dice = tiny_tokenizer(), np.random.default_rng(seed)
    matcher = compiled.matcher()
    masks = Masks(rows=1, vocab=VOCAB, device=torch.device("cpu"))
    closing = np.array(
        [token is not None and token[:1] in '"}],' for token in map(tokenizer.id_to_token, range(VOCAB))]
    )
    ids: list[int] = []
    for place in range(most):
        mask = masks.of([matcher])
        assert mask is not None
        score = dice.gumbel(size=VOCAB) + closing * place / 10
        score[EOS] += place / 10
        token = int(np.where(allowed(mask)[0], score, -np.inf).argmax())
        ids.append(token)
        if matcher.accept(token):
            return tokenizer.decode(ids), True
    return tokenizer.decode(ids), False
