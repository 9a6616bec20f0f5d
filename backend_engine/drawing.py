"""From a step's logits to its tokens: mask, shape, draw, and tell log-probabilities where they are asked for.

Log-probabilities are of the model's own distribution, as OpenAI's and vLLM's: before masks, bias, penalties,
temperature and filters. So they say what the model thinks of a token however it came to be drawn.
"""

from collections import defaultdict, deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import torch
from torch import Tensor

from .masks import masked
from .sampling import SamplingTensors, sample, sample_ahead
from .sequence import Sequence
from .shaping import shaped
from .token_counts import TokenCounts
from .types import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Ids [S] of the rows with these logits [S, vocab], on the device: drawn, or about to be."""

    logits: Tensor
    ids: Tensor
    rows: list[Sequence]


class Drawer:
    """Draws for one engine; for its thread. It keeps what the newest step tells of its tokens until they are taken."""

    def __init__(self, *, counts: TokenCounts, eos_ids: Ordered[int]) -> None:
        self._counts = counts
        self._eos_ids = eos_ids
        self._told: dict[int, deque[TokenLogprobs]] = {}  # by `order`: nobody is kept alive by what it left

    def draw(
        self,
        logits: Tensor,
        rows: list[Sequence],
        params: SamplingTensors,
        *,
        allowed: Tensor | None = None,
        ahead: bool = False,
    ) -> Drawn:
        """A token for each row of `logits` [S, vocab], which belong to `rows` and are drawn by `params`.

        `allowed` (see masks.py) bounds what may be drawn, before everything else. With `ahead`, some may be UNDECIDED,
        but sampling does not wait for the device.
        """
        bounded = logits if allowed is None else masked(logits, allowed)
        changed = shaped(bounded, rows, counts=self._counts, eos_ids=self._eos_ids)
        if ahead:
            ids = sample_ahead(changed, params, filtered=any(row.request.sampling.filtered for row in rows))
        else:
            ids = sample(changed, params)
        return Drawn(logits=logits, ids=ids, rows=rows)

    def read(self, drawn: Drawn) -> list[int]:
        """The ids; waits for the device. From now on, `told` is of them."""
        self._told = _told(drawn.logits, drawn.ids.clamp(min=0), drawn.rows)
        return drawn.ids.tolist()

    def told(self, sequence: Sequence) -> TokenLogprobs | None:
        """What the newest step tells of a sequence's next token, once for each; None if it did not ask."""
        waiting = self._told.get(sequence.order)
        return waiting.popleft() if waiting else None


def _told(logits: Tensor, ids: Tensor, rows: list[Sequence]) -> dict[int, deque[TokenLogprobs]]:
    asking = [row for row, sequence in enumerate(rows) if sequence.request.sampling.logprobs is not None]
    told: dict[int, deque[TokenLogprobs]] = defaultdict(deque)
    if not asking:
        return told
    place = torch.tensor(asking, device=logits.device)
    wanted = [rows[row].request.sampling.logprobs or 0 for row in asking]
    for row, one in zip(asking, token_logprobs(logits[place], ids[place], wanted), strict=True):
        told[rows[row].order].append(one)
    return told


def token_logprobs(logits: Tensor, ids: Tensor, wanted: list[int]) -> list[TokenLogprobs]:
    """What `logits` [S, vocab] say of `ids` [S] and of each row's `wanted[s]` likeliest tokens, likeliest first."""
    scores = logits.float().log_softmax(-1)
    values, order = scores.topk(min(max(wanted), scores.shape[-1]), dim=-1)
    chosen = scores.gather(-1, ids[:, None]).squeeze(-1)
    return [
        TokenLogprobs(token, logprob, tuple(zip(tokens[:count], logprobs[:count], strict=True)))
        for token, logprob, tokens, logprobs, count in zip(
            ids.tolist(), chosen.tolist(), order.tolist(), values.tolist(), wanted, strict=True
        )
    ]
