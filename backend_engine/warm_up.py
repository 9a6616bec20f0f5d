"""Runs once each kernel that a step may launch, before the first request: Triton compiles what is launched first.

That takes a second or more for each kernel and would stall whoever is served. Triton keeps what it compiled on disk,
so that the next start on the machine only loads it.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from ..prompt.errors import ConfigError
from .batch import RequestRows, StepBatch, build_batch
from .likeliest import likeliest
from .model import Decoder
from .pool import KVPool
from .probe import Probe
from .rounded_kv import ROUNDED, Block, RoundedBlock, rounded_dtype
from .span_loads import SpanLoader
from .spec import ModelSpec
from .types import KVBlock, ReusedSpan

logger = logging.getLogger(__name__)

# Attention has another kernel for each size of its tiles of rows, and for keys that are split into none, few or many.
_ROWS = (2, 4, 8, 16, 17, 32, 64, 128)
_KEYS = (512, 2048, 8192)
# Of one row by itself, the kernel that merges is another one for each power of two of parts.
_KEYS_OF_ONE = tuple(1 << power for power in range(14))
_WORTH_TELLING_S = 5.0


@torch.inference_mode()
def warm_up(decoder: Decoder, pool: KVPool, spans: SpanLoader, *, spare: int, max_tokens: int) -> None:
    """Launch all of them on the page `spare`, which is nobody's, as for requests of up to `max_tokens` tokens."""
    began, device = time.monotonic(), decoder.device
    for rows, keys in _sizes(max_tokens):
        output = decoder.forward(_batch(rows, keys, pool, spare), pool)
        likeliest(decoder.logits(output.hidden))
    batch = _batch(1, 1, pool, spare)
    looked = torch.zeros(1, device=device)
    probe = Probe(rows=batch.logit_rows, slots=batch.slots, depth=0.0, attention=looked)
    decoder.forward(replace(batch, probes=(probe,)), pool)
    pool.copy(0, spare, tokens=1)
    for block in _blocks(decoder.spec, pool):
        spans.add((ReusedSpan(0, block),), np.array([spare * pool.page_size]), wanted=lambda: True)
        spans.loads().settle()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if (seconds := time.monotonic() - began) > _WORTH_TELLING_S:
        logger.info("kernels were compiled in %.0f s; the next start finds them on disk", seconds)


def _sizes(max_tokens: int) -> Iterator[tuple[int, int]]:
    """The rows and the keys of one request in each step."""
    for rows, counts in ((1, _KEYS_OF_ONE), *((rows, (rows, *_KEYS)) for rows in _ROWS if rows <= max_tokens)):
        yield from ((rows, keys) for keys in sorted({min(keys, max_tokens) for keys in counts}))


def _batch(rows: int, keys: int, pool: KVPool, spare: int) -> StepBatch:
    part = RequestRows(
        ids=[0] * rows, indices=range(keys - rows, keys), pages=[spare] * -(-keys // pool.page_size), logits=[rows - 1]
    )
    return build_batch([part], page_size=pool.page_size, device=pool.data.device)


def _blocks(spec: ModelSpec, pool: KVPool) -> Iterator[Block]:
    """One token of each kind that is stored."""
    shape = (spec.layers, 1, spec.kv_heads, spec.head_dim)
    wide = KVBlock(*torch.zeros((2, *shape), dtype=pool.wide, device=pool.data.device))
    yield wide
    for name in ROUNDED:
        with suppress(ConfigError):  # this device has no such numbers
            yield RoundedBlock.of(wide, rounded_dtype(name, pool.data.device, field="kv_dtype"))
