"""The likeliest id of each row of scores: on a GPU one pass over what the head's product left, in its own dtype."""

from importlib import import_module

from torch import Tensor


def likeliest(scores: Tensor) -> Tensor:
    """The place of the largest of each row of `scores` [rows, vocab], the first of several; int64 [rows].

    Nothing is read back. Where a row has a NaN, it may be any place.
    """
    if scores.device.type != "cuda":
        return scores.argmax(-1)
    return import_module(".likeliest_triton", __package__).likeliest(scores)
