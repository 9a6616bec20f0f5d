"""From a step's logits to its tokens: mask, shape, draw, and tell log-probabilities where they are asked for.

Log-probabilities are of the model's own distribution, as OpenAI's and vLLM's: before masks, bias, penalties,
temperature and filters. So they say what the model thinks of a token however it came to be drawn.
"""

from collections import defaultdict, deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from torch import Tensor

from .likeliest import likeliest
from .masks import masked
from .sampling import SamplingTensors, sample, sample_ahead
from .sequence import Sequence
from .shaping import shaped
from .token_counts import TokenCounts
from .transfers import Fetch, sent
from .types import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Ids [S] of some rows on the device, drawn or about to be, and what the host will know of them."""

    ids: Tensor
    asking: list[Sequence]  # who asks for log-probabilities, once for each such row
    fetch: Fetch


class Drawer:
    """Draws for one engine; for its thread. It keeps what the newest step tells of its tokens until they are taken."""

    def __init__(self, *, counts: TokenCounts, eos_ids: Ordered[int]) -> None:
        self._counts = counts
        self._eos_ids = eos_ids
        self._told: defaultdict[int, deque[TokenLogprobs]] = defaultdict(
            deque
        )  # by `order`: nobody is kept alive by what it left

    def draw(
        self,
        logits: Tensor,
        rows: list[Sequence],
        params: SamplingTensors | None,
        *,
        allowed: Tensor | None = None,
        ahead: bool = False,
    ) -> Drawn:
        """A token for each row of `logits` [S, vocab], which belong to `rows` and are drawn by `params` (None: all
        greedily).

        `allowed` (see masks.py) bounds what may be drawn, before everything else. With `ahead`, some may be UNDECIDED,
        but sampling does not wait for the device.
        """
        bounded = logits if allowed is None else masked(logits, allowed)
        changed = shaped(bounded, rows, counts=self._counts, eos_ids=self._eos_ids)
        filtered = any(row.request.sampling.filtered for row in rows)
        ahead = ahead or (changed.is_cuda and not filtered)  # then none is UNDECIDED, and the device is not waited for
        if params is None:
            ids = likeliest(changed)
        elif ahead:
            ids = sample_ahead(changed, params, filtered=filtered)
        else:
            ids = sample(changed, params)
        asking = [row for row, sequence in enumerate(rows) if sequence.request.sampling.logprobs is not None]
        told: tuple[Tensor, ...] = ()
        if asking:
            place = sent(asking, logits.device)
            most = max(_wanted(rows[row]) for row in asking)
            told = _scored(logits[place], ids[place].clamp(min=0), most)
        return Drawn(ids=ids, asking=[rows[row] for row in asking], fetch=Fetch(ids, *told))

    def read(self, drawn: Drawn) -> list[int]:
        """The ids; waits for them. From now on, `told` is of them."""
        ids, *scored = drawn.fetch.read()
        self._told = defaultdict(deque)
        if scored:
            tokens, chosen, order, values = scored
            told = _as_logprobs(tokens, chosen, order, values, [_wanted(sequence) for sequence in drawn.asking])
            for sequence, one in zip(drawn.asking, told, strict=True):
                self._told[sequence.order].append(one)
        return ids.tolist()

    def told(self, sequence: Sequence) -> TokenLogprobs | None:
        """What the newest step tells of a sequence's next token, once for each; None if it did not ask."""
        waiting = self._told.get(sequence.order)
        return waiting.popleft() if waiting else None


def _wanted(sequence: Sequence) -> int:
    return sequence.request.sampling.logprobs or 0


def token_logprobs(logits: Tensor, ids: Tensor, wanted: list[int]) -> list[TokenLogprobs]:
    """What `logits` [S, vocab] say of `ids` [S] and of each row's `wanted[s]` likeliest tokens, likeliest first."""
    return _as_logprobs(*_scored(logits, ids, max(wanted)), wanted)


def _scored(logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ids and their log-probabilities [S], the `most` likeliest ids and theirs [S, most]."""
    scores = logits.float().log_softmax(-1)
    values, order = scores.topk(min(most, scores.shape[-1]), dim=-1)
    return ids, scores.gather(-1, ids[:, None]).squeeze(-1), order, values


def _as_logprobs(ids: Tensor, chosen: Tensor, order: Tensor, values: Tensor, wanted: list[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token, logprob, tuple(zip(tokens[:count], logprobs[:count], strict=True)))
        for token, logprob, tokens, logprobs, count in zip(
            ids.tolist(), chosen.tolist(), order.tolist(), values.tolist(), wanted, strict=True
        )
    ]
