"""Embedders: the contract, and the one on sentence-transformers. torch is imported when the first text is embedded."""

import hashlib
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend_engine.hub import resolve
from ..prompt import BadRequest, ModelUnavailable

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors = np.ndarray[Any, np.dtype[np.float32]]


class Embedder(Protocol):
    """Texts to vectors. Safe to call from several threads; the same text gives the same vector, whatever the batch.

    `identity` names the function that is computed (the weights, not where they lie): vectors of two embedders of one
    identity may be compared.
    """

    @property
    def identity(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """float32 [texts, dim], each row of length 1. Texts that are too long for the model are cut at their end."""
        ...

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """The same for questions, which some models embed in another way."""
        ...


class SentenceEmbedder:
    """A sentence-transformers model by catalogue name, folder or hub id (pulled before; no network is used).

    Batches of 32 keep the padding small; one call at a time, as the tokenizer is not safe to share.
    """

    def __init__(self, name: str = "all-minilm-l6-v2", *, device: str = "cpu", batch_size: int = 32) -> None:
        self._name = name
        self._device = device
        self._batch_size = batch_size
        self._lock = threading.Lock()

    @cached_property
    def _path(self) -> Path:
        return resolve(self._name)

    @cached_property
    def _model(self) -> "SentenceTransformer":
        from sentence_transformers import SentenceTransformer

        try:
            return SentenceTransformer(str(self._path), device=self._device, local_files_only=True)
        except Exception as error:  # the readers beneath raise nearly anything for a damaged file
            raise ModelUnavailable(f"the embedder {self._name} cannot be loaded: {error}") from error

    @property
    def identity(self) -> str:
        """Digest of the model's weights, settings and vocabulary."""
        return self._identity

    @cached_property
    def _identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(self._path.rglob("*")):
            name = path.relative_to(self._path).as_posix()
            if path.suffix in (".json", ".safetensors", ".txt") and name != "promptsluice.json":
                digest.update(name.encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return f"sentence-transformers:{digest.hexdigest()}"

    @property
    def dim(self) -> int:
        """Length of a vector."""
        with self._lock:
            dim = self._model.get_embedding_dimension()
        assert dim is not None, "a sentence-transformers model without a dimension"
        return dim

    @property
    def max_tokens(self) -> int:
        """Tokens of a text that the model reads, its marks at both ends among them; the rest is cut."""
        with self._lock:
            longest = self._model.max_seq_length
        assert longest is not None, "a sentence-transformers model without a limit"
        return longest

    def sizes(self, texts: Sequence[str]) -> list[int]:
        """The tokens of each text before any cut, the marks at both ends among them."""
        with self._lock:
            return [
                len(ids) for ids in self._model.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
            ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids of the model's vocabulary. BadRequest for an id that it lacks."""
        with self._lock:
            size = len(self._model.tokenizer)
            if max(ids) >= size:
                raise BadRequest(f"input has the id {max(ids)}, but the embedder has {size} tokens", param="input")
            return self._model.tokenizer.decode(list(ids), skip_special_tokens=True)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """See Embedder."""
        return self._encode("encode_document", texts)

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """See Embedder."""
        return self._encode("encode_query", texts)

    def _encode(self, how: str, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        with self._lock:
            vectors = getattr(self._model, how)(
                list(texts),
                batch_size=self._batch_size,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        return np.ascontiguousarray(vectors, dtype=np.float32)
