"""The rooms that requests share beside their backends: collections with their embedder, the chunk store, responses
that are kept for the next turn, answers that may be given again, and records of what happened.

Heavy ones load when they are first needed and block while they do; called from worker threads.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..compressors.context import Count
from ..policies import PolicySet
from ..policies.schema import RetrieveSpec
from ..prompt import Prompt
from .answer_cache import AnswerCache
from .kept_texts import KeptTexts
from .records import Records
from .responses.kept import ResponseStore
from .salts import Salts
from .summaries import Summaries
from .turns import Turns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..kv_reuse.store import ChunkStore
    from ..rag import Collections, SentenceEmbedder
    from .backends.base import Backend


class Rooms:
    """Opens each room of a policy file once."""

    def __init__(self, policy_set: PolicySet) -> None:
        self._policy_set = policy_set
        self._lock = threading.RLock()
        self._backends: Mapping[str, Backend] = {}
        self._salts: Callable[[], Salts] = Salts
        self.responses = ResponseStore(policy_set.server.responses)
        self.answers = AnswerCache(policy_set.server.answer_cache)
        self.summaries = Summaries(policy_set.server.summaries, policy_set.summaries_path)
        kept = policy_set.server.originals
        self.originals = KeptTexts(limit=kept.bytes, total=kept.total, age=kept.age)
        self.records = Records(policy_set.server.records)
        self.turns = Turns(policy_set.server.turns)

    def wire(self, policy_set: PolicySet, backends: Mapping[str, "Backend"]) -> None:
        """By the house, and by each that follows it: the file in force, and the backends to count and warm with, which
        are made with the rooms."""
        self._policy_set, self._backends = policy_set, backends
        self._salts = cache(lambda: Salts.of(policy_set))

    def salts(self) -> Salts:
        """Whose chunks are whose by the file in force: backends may outlive the file that they were made for."""
        return self._salts()

    def model_path(self, name: str) -> Path:
        """Where a model's files lie. ModelUnavailable says what to run when they are not there."""
        from ..backend_engine.hub import ModelHub, default_root

        return ModelHub(self._policy_set.models_cache or default_root()).resolve(name)

    def store(self) -> "ChunkStore":
        """The chunk store."""
        with self._lock:
            return self._store

    def embedder(self) -> "SentenceEmbedder":
        """The embedding model of collections and extractive compression."""
        with self._lock:
            return self._embedder

    def embed(self, texts: Sequence[str]) -> "NDArray[np.float32]":
        """Vectors of texts, [texts, dim]."""
        return self.embedder().embed(texts)

    def collections(self) -> "Collections":
        """The document collections."""
        with self._lock:
            return self._collections

    def retrieve(self, spec: RetrieveSpec, prompt: Prompt, *, count: Count) -> tuple[Prompt, int]:
        """The prompt with what was found for its question, and the number of chunks. Raises UnknownCollection."""
        from ..rag import into_prompt, within_budget

        hits = self.collections().get(spec.collection).search(prompt.question, top_k=spec.top_k)
        kept = within_budget(hits, spec.max_tokens, count=count)
        return into_prompt(prompt, kept), len(kept)

    @cached_property
    def _store(self) -> "ChunkStore":
        from .stores import chunk_store

        return chunk_store(self._policy_set)

    @cached_property
    def _embedder(self) -> "SentenceEmbedder":
        from ..rag import SentenceEmbedder

        return SentenceEmbedder(str(self.model_path(self._policy_set.models.embedder)))

    @cached_property
    def _collections(self) -> "Collections":
        from ..rag import Collections

        return Collections(
            self._policy_set.collections_root,
            embedder=self._embedder,
            count_tokens=self._count,
            on_chunks=self._warm,
            on_gone=self._forget,
        )

    def _count(self, text: str) -> int:
        """Chunks are measured in the tokens of the first backend: one collection serves them all."""
        return next(iter(self._backends.values())).count_tokens(text)

    def _warm(self, collection: str, texts: Sequence[str]) -> None:
        for backend in self._backends.values():
            backend.warm(texts, collection=collection)

    def _forget(self, collection: str, texts: Sequence[str]) -> None:
        for backend in self._backends.values():
            backend.forget(texts, collection=collection)
