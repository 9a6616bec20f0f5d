"""Log-probabilities of a prompt's own tokens, from the hidden states of its prefill, and of all that may follow it."""

import torch
from torch import Tensor

from .drawing import token_logprobs
from .model import Decoder
from .plan import Chunk
from .sequence import Sequence

# Rows whose logits over the whole vocabulary are in memory at a time.
SCORED_ROWS = 64


def score(decoder: Decoder, chunk: Chunk, hidden: Tensor) -> None:
    """Note what follows each of the chunk's scored rows, of which `hidden` [scored, hidden] are the last states."""
    sequence, scored = chunk.sequence, chunk.rows[chunk.scored]
    for start in range(0, len(hidden), SCORED_ROWS):
        logits = decoder.logits(hidden[start : start + SCORED_ROWS])
        rows = scored[start : start + len(logits)]
        following = torch.from_numpy(sequence.tokens[rows + 1]).to(logits.device)
        wanted = sequence.request.sampling.logprobs
        if wanted is not None:
            told = token_logprobs(logits, following, [wanted] * len(logits))
            sequence.told.update(zip(rows.tolist(), told, strict=True))
        chosen = _logprobs_in_place(logits, following)
        assert sequence.logprobs is not None
        sequence.logprobs[torch.from_numpy(rows)] = chosen.to(sequence.logprobs.device)


def _logprobs_in_place(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of `ids` [S] under `logits` [S, vocab], which are spoilt: copies of them cost as much again."""
    chosen, most = logits.gather(1, ids[:, None]).squeeze(1), logits.amax(-1)
    return chosen - most - logits.sub_(most[:, None]).exp_().sum(-1).log()


def keep_first(logits: Tensor, owners: list[Sequence]) -> None:
    """Note the distribution of the first token for those of `owners`, a row of `logits` [S, vocab] each, who ask."""
    for row, sequence in enumerate(owners):
        if sequence.request.first_logprobs and sequence.first_logprobs is None:
            sequence.first_logprobs = logits[row].float().log_softmax(-1).cpu()
