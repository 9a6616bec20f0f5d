"""A token classification model from a folder, run over texts of any length in windows. Imports torch."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForTokenClassification, AutoTokenizer

from ..prompt import ConfigError
from .result import Span

_BATCH = 8  # windows that run together
_LONGEST = 512  # tokens of a window, if the model takes as many
_SHARED = 8  # two windows share an eighth of a window's tokens


@dataclass(slots=True)
class Votes:
    """One text's tokens `[tokens, 3]`: first character, the one behind the last, probability that it should stay."""

    rows: list[NDArray[np.float64]] = field(default_factory=list)
    end: int = 0

    def of(self, spans: Sequence[Span]) -> NDArray[np.float64]:
        """The mean vote of each span's tokens (ascending, disjoint), 0 where it has none. A token belongs to the span
        in which its last character lies.
        """
        total, number = np.zeros(len(spans)), np.zeros(len(spans))
        if not spans or not self.rows:
            return total
        tokens = np.concatenate(self.rows)
        starts, ends = np.array(spans, dtype=np.int64).T
        last = np.maximum(tokens[:, 0], tokens[:, 1] - 1)
        index = np.searchsorted(starts, last, side="right") - 1
        inside = (index >= 0) & (last < ends[index])
        np.add.at(total, index[inside], tokens[inside, 2])
        np.add.at(number, index[inside], 1.0)
        return total / np.maximum(number, 1.0)


class TokenClassifier:
    """A model with its tokenizer. Any thread; one batch at a time."""

    def __init__(self, tokenizer: Any, model: Any, *, keep_label: int) -> None:
        self._tokenizer, self._model, self._label = tokenizer, model.eval(), keep_label
        self._size = min(_LONGEST, int(model.config.max_position_embeddings), int(tokenizer.model_max_length))
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: str, keep_label: int) -> Self:
        """Raises ConfigError for a folder that holds no such model, or one whose model lacks the label."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForTokenClassification.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        except Exception as error:  # the readers beneath raise nearly anything for a damaged file
            raise ConfigError(f"the token classifier {folder} cannot be loaded: {error}") from error
        if not tokenizer.is_fast:
            raise ConfigError(f"the token classifier {folder} has no fast tokenizer, which tells where tokens stand")
        if keep_label >= model.config.num_labels:
            raise ConfigError(f"the token classifier {folder} has no label {keep_label} of {model.config.num_labels}")
        return cls(tokenizer, model, keep_label=keep_label)

    def votes(self, texts: Sequence[str], *, remaining: Callable[[], float], clock: Callable[[], float]) -> list[Votes]:
        """The votes on each text, the first texts first, as far as there is time by the batches before."""
        found = [Votes() for _ in texts]
        speed = 0.0
        for number, text in enumerate(texts):
            for fresh, windows in self._batches(text):
                if remaining() <= windows * speed:
                    return found
                began = clock()
                rows = fresh()
                found[number].rows.append(rows)
                found[number].end = int(rows[-1, 1]) if len(rows) else 0
                speed = (clock() - began) / windows
            found[number].end = len(text)
        return found

    def _batches(self, text: str) -> Iterator[tuple[Callable[[], NDArray[np.float64]], int]]:
        """Batches that are yet to be run, and how many windows each has; together they tell of each token once."""
        encoded = self._tokenizer(
            text,
            truncation=True,
            max_length=self._size,
            stride=self._size // _SHARED,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        count = len(encoded["input_ids"])
        for first in range(0, count, _BATCH):
            window = range(first, min(first + _BATCH, count))
            yield lambda window=window: self._run(encoded, window, count), len(window)

    def _run(self, encoded: Any, window: range, count: int) -> NDArray[np.float64]:
        names = [name for name in self._tokenizer.model_input_names if name in encoded]
        padded = self._tokenizer.pad(
            {name: [encoded[name][n] for n in window] for name in names}, padding=True, return_tensors="pt"
        )
        with self._lock, torch.inference_mode():
            kept = self._model(**padded).logits.softmax(-1)[..., self._label].double().numpy()
        return np.concatenate([self._told(encoded, n, kept[row], count) for row, n in enumerate(window)])

    def _told(self, encoded: Any, n: int, kept: NDArray[np.float64], count: int) -> NDArray[np.float64]:
        """What window `n` of `count` tells: of the tokens that two windows share, each tells of the half inside it."""
        real = np.flatnonzero(np.array(encoded["special_tokens_mask"][n]) == 0)
        shared = self._size // _SHARED
        low = shared // 2 if n else 0
        high = len(real) - (shared - shared // 2 if n + 1 < count else 0)
        offsets = np.array(encoded["offset_mapping"][n], dtype=np.float64)[real[low:high]].reshape(-1, 2)
        return np.column_stack((offsets, kept[real[low:high]]))


_loading = threading.Lock()


def classifier(folder: str, keep_label: int) -> TokenClassifier:
    """The classifier of a folder, loaded once in a process. Raises as `TokenClassifier.load`."""
    with _loading:
        return _loaded(folder, keep_label)


@lru_cache(maxsize=2)
def _loaded(folder: str, keep_label: int) -> TokenClassifier:
    return TokenClassifier.load(folder, keep_label)
