"""The tokens that the grammars of a step's rows allow, as one packed tensor: filled on the host, sent in one copy."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..masks import mask_words
from .matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor

_ALL = -1


class Masks:
    """A buffer for up to `rows` rows of the form that ../masks.py describes.

    One buffer is enough: a step with masks is not launched before the ids of the last one are known.
    """

    def __init__(self, *, rows: int, vocab: int, device: torch.device) -> None:
        self._device = device
        self._host = torch.full((rows, mask_words(vocab)), _ALL, dtype=torch.int32, pin_memory=device.type == "cuda")

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    def of(self, matchers: Sequence[Matcher | None]) -> Tensor | None:
        """int32 [rows, words] on the device, valid until the next call; None when no row is restricted.

        A row without a matcher, or whose matcher has failed, allows everything.
        """
        restricted = [(matcher, row) for row, matcher in enumerate(matchers) if matcher is not None]
        if not restricted:
            return None
        host = self._host[: len(matchers)]
        words = host.shape[1]
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.core, row) for matcher, row in restricted], host.data_ptr(), 4 * words, len(host)
        )
        free = [row for row, matcher in enumerate(matchers) if matcher is None or matcher.failed]
        host[free] = _ALL
        return host.to(self._device, non_blocking=True)
