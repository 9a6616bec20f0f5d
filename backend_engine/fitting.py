"""An engine with as much KV memory as there is: where the pool or the graphs do not fit, the pool gets smaller."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from ..prompt.errors import ModelUnavailable
from .engine import Engine
from .loader import LoadedModel
from .options import EngineOptions
from .pool import KVPool
from .relief import release_memory
from .rounded_kv import pool_dtype
from .steps import SingleRowSteps

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 1024


def fitting_engine(
    model: LoadedModel,
    *,
    options: EngineOptions | None = None,
    single_rows: Callable[..., SingleRowSteps] | None = None,
) -> Engine:
    """An engine whose pool has at most `options.kv_bytes`, and a quarter less for each time that is too much.

    Raises ModelUnavailable if not even 1,024 tokens fit beside the weights.
    """
    asked = options = options or EngineOptions()
    kv_dtype = pool_dtype(options.kv_dtype, model.decoder.dtype, model.decoder.device)
    token = KVPool.bytes_per_token(model.spec, kv_dtype)
    while True:
        try:
            engine = Engine(model, options=options, single_rows=single_rows)
        except torch.OutOfMemoryError:
            smaller = options.kv_bytes * 3 // 4
        else:
            break
        release_memory(model.decoder.device)
        if options.pages is not None or smaller < _LEAST_TOKENS * token:
            raise ModelUnavailable(
                f"{model.decoder.device} has no memory for the KV of {_LEAST_TOKENS} tokens beside the weights; "
                "use a smaller model, or end what else uses the device"
            )
        options = replace(options, kv_bytes=smaller)
    if options.kv_bytes < asked.kv_bytes:
        logger.warning(
            "the KV pool is smaller than asked for: %d MiB instead of %d, as much as the device has room for",
            options.kv_bytes >> 20,
            asked.kv_bytes >> 20,
        )
    return engine
