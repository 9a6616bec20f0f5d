"""Fixtures of the room: an embedder of arithmetic alone, so that no model is needed, and collections on it."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from promptsluice.rag import Collections


class WordEmbedder:
    """Fulfils the Embedder contract: a text's vector counts its hashed words. Texts that share words are near."""

    dim = 64

    def __init__(self, identity: str = "words") -> None:
        self.identity = identity
        self.embedded = 0

    def embed(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        self.embedded += len(texts)
        vectors = np.full((len(texts), self.dim), 1e-3, dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest()) % self.dim] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    embed_queries = embed


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def words() -> Callable[[str], int]:
    """The measure of length in these tests: words."""
    return lambda text: len(text.split())


@pytest.fixture
def collections(tmp_path: Path, embedder: WordEmbedder, words: Callable[[str], int]) -> Collections:
    return Collections(tmp_path / "collections", embedder=embedder, count_tokens=words)


@pytest.fixture
def reopen(tmp_path: Path, words: Callable[[str], int]) -> Callable[..., Collections]:
    """The same collections as another process would see them, with other parts if asked for."""

    def make(**parts: Any) -> Collections:
        chosen = {"embedder": WordEmbedder(), "count_tokens": words, **parts}
        return Collections(tmp_path / "collections", **chosen)

    return make


@pytest.fixture
def new_embedder() -> Callable[[str], WordEmbedder]:
    return WordEmbedder
