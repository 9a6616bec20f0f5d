"""The tiers that an engine's options ask for."""

import logging

import torch

from ..options import EngineOptions
from ..pool import KVPool
from ..spec import ModelSpec
from .base import PrefixTier
from .disk import DiskFolder
from .empty import EmptyTier
from .keys import PageKeys
from .streams import InlineStream, SideStream
from .tiered import Tiers
from .transfer import Transfers

logger = logging.getLogger(__name__)


def open_tiers(
    options: EngineOptions, pool: KVPool, spec: ModelSpec, *, fingerprint: str, stream: SideStream | None = None
) -> PrefixTier:
    """Host memory and disk under `pool`, or the empty tier where no budget holds a page.

    `stream` is where copies run: by default a CUDA stream on a GPU, and the engine's thread on a CPU. Raises
    ConfigError for a folder that cannot be used.
    """
    dtype, device = pool.dtype, pool.data.device
    page_bytes = KVPool.bytes_per_token(spec, dtype) * pool.page_size
    pages = options.host_bytes // page_bytes
    if not pages:
        if options.host_bytes:
            logger.warning("evicted prefixes are not kept: a page has %d bytes, host_bytes are fewer", page_bytes)
        return EmptyTier()
    on_card = device.type == "cuda"
    try:
        memory = KVPool(spec, pages=pages, page_size=pool.page_size, dtype=dtype, pinned=on_card)
    except RuntimeError as error:  # torch's word for memory that cannot be had, or not be pinned
        logger.warning("evicted prefixes are not kept: no %d bytes of host memory (%s)", pages * page_bytes, error)
        return EmptyTier()
    naming = PageKeys(
        fingerprint=fingerprint,
        layout=(spec.layers, spec.kv_heads, spec.head_dim),
        dtype=str(dtype),
        page_size=pool.page_size,
    )
    disk = None
    if options.disk_bytes and options.disk_path is not None:
        disk = DiskFolder(options.disk_path, budget=options.disk_bytes, space=naming.space, page_bytes=page_bytes)
    return Tiers(
        naming=naming,
        memory=memory,
        transfers=Transfers(pool, memory, stream or side_stream(device)),
        disk=disk,
        # A sixteenth of the pool: small pools must not lose more than they can spare.
        batch=max(1, min(64, pool.pages // 16)),
        headroom=min(2 * options.step_tokens // pool.page_size, pool.pages // 16) if on_card else 0,
    )


def side_stream(device: torch.device) -> SideStream:
    """Where copies beside the steps of a device run."""
    if device.type != "cuda":
        return InlineStream()
    from .streams_cuda import CudaStream

    return CudaStream(device)
