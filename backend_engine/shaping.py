"""What is done to a model's logits before the temperature: bias, penalties, ends that must not come yet.

In this order, which is that of transformers and vLLM: `logit_bias`, `repetition_penalty`, frequency and presence
penalties, `min_tokens`. Pure functions of tensors, and one that gathers them for the rows of a step.
"""

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from .sequence import Sequence
from .token_counts import IN_PROMPT, TokenCounts
from .transfers import sent


def shaped(logits: Tensor, sequences: list[Sequence], *, counts: TokenCounts, eos_ids: Ordered[int]) -> Tensor:
    """The logits [S, vocab] as each row's sequence wants them; the input stays as it is."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.shaped]
    if not rows:
        return logits
    owners = [sequences[row] for row in rows]
    place = sent(rows, logits.device)
    part = biased(logits[place], [owner.request.sampling.logit_bias for owner in owners])
    penalized = [row for row, owner in enumerate(owners) if owner.request.sampling.penalized]
    if penalized:
        part = _penalized_rows(part, penalized, owners, counts)
    part = banned(part, [_ends(owner, eos_ids) for owner in owners])
    return logits.index_copy(0, place, part)


def _penalized_rows(logits: Tensor, rows: list[int], owners: list[Sequence], counts: TokenCounts) -> Tensor:
    chosen = [owners[row] for row in rows]
    place = sent(rows, logits.device)
    fields = [owner.request.sampling for owner in chosen]
    weights = sent(
        [[params.repetition_penalty, params.frequency_penalty, params.presence_penalty] for params in fields],
        logits.device,
        torch.float32,
    )
    part = penalized(logits[place], counts.of(chosen, vocab=logits.shape[-1]), weights)
    return logits.index_copy(0, place, part)


def penalized(logits: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    """Logits [S, vocab] with repetition, frequency and presence penalties, `weights` [S, 3] in this order.

    `counts` int32 [S, vocab] is how often a token was generated, plus IN_PROMPT if it stands in the prompt. Repetition
    divides the positive logits of all known tokens and multiplies the negative ones (arXiv:1909.05858); a generated
    token then loses `count * frequency + presence` (OpenAI's formula).
    """
    repetition, frequency, presence = weights[:, :, None].unbind(1)
    generated = counts % IN_PROMPT
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    return logits - frequency * generated - presence * (generated > 0)


def biased(logits: Tensor, biases: Ordered[Ordered[tuple[int, float]]]) -> Tensor:
    """Logits [S, vocab] with each row's pairs of id and value added."""
    rows, ids = _places([[token for token, _ in pairs] for pairs in biases])
    if not ids:
        return logits
    values = sent([value for pairs in biases for _, value in pairs], logits.device, torch.float32)
    places = sent([rows, ids], logits.device)
    return logits.index_put(tuple(places), values, accumulate=True)


def banned(logits: Tensor, ids: Ordered[Ordered[int]]) -> Tensor:
    """Logits [S, vocab] with each row's `ids` at minus infinity; a row that this would leave nothing keeps its own."""
    rows, tokens = _places(ids)
    if not tokens:
        return logits
    places = sent([rows, tokens], logits.device)
    without = logits.index_put(tuple(places), logits.new_full((), -torch.inf))
    return torch.where(without.amax(-1, keepdim=True) == -torch.inf, logits, without)


def _ends(sequence: Sequence, eos_ids: Ordered[int]) -> Ordered[int]:
    """The ids that must not be drawn yet."""
    params = sequence.request.sampling
    if sequence.generated >= params.min_tokens:
        return ()
    return params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_ids)


def _places(ids: Ordered[Ordered[int]]) -> tuple[list[int], list[int]]:
    rows = [row for row, each in enumerate(ids) for _ in each]
    return rows, [token for each in ids for token in each]
