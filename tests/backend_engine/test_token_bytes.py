"""Single tokens as bytes: put together, they are the text."""

from collections.abc import Callable

import pytest
from promptsluice.backend_engine.token_bytes import TokenBytes
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = "Naïve cafés; 你好，世界 \N{WAVING HAND SIGN}\n\tx = 1 "


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def with_byte_fallback() -> Tokenizer:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581x", "<unk>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "x")], unk_token="<unk>", byte_fallback=True)
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )  # fmt: skip
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, with_byte_fallback])
def test_the_bytes_of_a_texts_tokens_are_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokens = TokenBytes(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(tokens[one] for one in ids) == TEXT.encode()
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None and tokens[end] == b"<|end|>"
    assert tokens[1_000_000] == b"", "a vocabulary may be padded"


def test_a_tokenizer_of_words_shows_what_it_decodes() -> None:
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "<unk>": 1}, unk_token="<unk>"))
    assert TokenBytes(tokenizer)[0] == b"hello"
