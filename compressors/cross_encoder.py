"""A cross-encoder from a folder, which reads a question and a text together and says how well they fit. Imports torch.

Nogueira and Cho 2019, "Passage Re-ranking with BERT" (arXiv:1901.04085).
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..prompt import ConfigError


class CrossEncoder:
    """A sentence-transformers CrossEncoder. Any thread; one at a time, see `turn`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: str) -> Self:
        """Raises ConfigError for a folder that holds no such model, or one that gives more than one score."""
        try:
            from sentence_transformers import CrossEncoder as Theirs

            model = Theirs(folder, device="cpu", local_files_only=True)
        except Exception as error:  # the readers beneath raise nearly anything for a damaged file
            raise ConfigError(
                f"the cross-encoder {folder} cannot be loaded; name the folder of a sentence-transformers CrossEncoder"
                f" in the option model: {error}"
            ) from error
        if model.num_labels != 1:
            raise ConfigError(f"the cross-encoder {folder} has {model.num_labels} scores for a pair; it must have one")
        return cls(model)

    @contextmanager
    def turn(self, seconds: float) -> Iterator[bool]:
        """Waits for the others at most so long; whether it may read now."""
        free = self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        try:
            yield free
        finally:
            if free:
                self._lock.release()

    def scores(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """How well each text fits the question, [texts]; only their order counts. For who has the turn."""
        found = self._model.predict([(question, text) for text in texts], show_progress_bar=False)
        scores = np.asarray(found, dtype=np.float32)
        if scores.shape != (len(texts),):
            raise ValueError(f"the cross-encoder gave scores of shape {scores.shape} for {len(texts)} texts")
        return scores


_lock = threading.Lock()
_loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cross-encoder")


def cross_encoder(folder: str, *, seconds: float) -> CrossEncoder | None:
    """The cross-encoder of a folder, None where it is not there within these seconds; it is loaded all the same, once
    in a process, and what could not be loaded is not tried again. Raises as `CrossEncoder.load`.
    """
    with _lock:
        begun = _begun(folder)
    try:
        error = begun.exception(timeout=min(seconds, threading.TIMEOUT_MAX))
    except TimeoutError:
        return None
    if error is not None:
        raise ConfigError(str(error)) from None  # a fresh one: the kept one would gather all requests' frames
    return begun.result()


@lru_cache(maxsize=2)
def _begun(folder: str) -> "Future[CrossEncoder]":
    return _loader.submit(CrossEncoder.load, folder)
