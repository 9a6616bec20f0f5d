"""A cross-encoder from a folder, which reads a question and a text together and says how well they fit. Imports torch.

Nogueira and Cho 2019, "Passage Re-ranking with BERT" (arXiv:1901.04085).
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..prompt import ConfigError


class CrossEncoder:
    """A sentence-transformers CrossEncoder. Any thread; one batch at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: str) -> Self:
        """Raises ConfigError for a folder that holds no such model, or one that gives more than one score."""
        from sentence_transformers import CrossEncoder as Theirs

        try:
            model = Theirs(folder, device="cpu", local_files_only=True)
        except Exception as error:  # the readers beneath raise nearly anything for a damaged file
            raise ConfigError(
                f"the cross-encoder {folder} cannot be loaded; name the folder of a sentence-transformers CrossEncoder"
                f" in the option model: {error}"
            ) from error
        if model.num_labels != 1:
            raise ConfigError(f"the cross-encoder {folder} has {model.num_labels} scores for a pair; it must have one")
        return cls(model)

    def scores(self, question: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """How well each text fits the question, [texts]; only their order counts."""
        with self._lock:
            found = self._model.predict([(question, text) for text in texts], show_progress_bar=False)
        return np.nan_to_num(np.asarray(found, dtype=np.float32))


_loading = threading.Lock()


def cross_encoder(folder: str) -> CrossEncoder:
    """The cross-encoder of a folder, loaded once in a process. Raises as `CrossEncoder.load`."""
    with _loading:
        return _loaded(folder)


@lru_cache(maxsize=2)
def _loaded(folder: str) -> CrossEncoder:
    return CrossEncoder.load(folder)
