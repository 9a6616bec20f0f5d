"""Names of prefix pages: a page's key is a digest of everything its KV depends on.

That is the model (weights, dtype, sizes), the tenant, and all tokens up to the page's end. Equal keys, equal KV; a
tenant's keys cannot be derived from, or met by, another one's.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

FORMAT = 1
"""Changes whenever a page's bytes or names mean something else: pages of other formats are never found."""

_BYTES = 16


class PageKeys:
    """Chained digests, 16 bytes a page: each page's key is made of the one before it and its own tokens."""

    def __init__(self, *, fingerprint: str, layout: tuple[int, ...], dtype: str, page_size: int) -> None:
        """`fingerprint` names the model's weights, `layout` the sizes of a token's KV."""
        self.page_size = page_size
        parts = repr((FORMAT, fingerprint, layout, dtype, page_size))
        self.space = blake2b(parts.encode(), digest_size=_BYTES).digest()

    def start(self, namespace: str) -> bytes:
        """What stands before a namespace's first page."""
        return blake2b(namespace.encode(), key=self.space, digest_size=_BYTES).digest()

    def extend(self, before: bytes, ids: NDArray[np.int64]) -> list[bytes]:
        """The keys of the whole pages of `ids`, which follow the page with the key `before`."""
        data, size, keys = memoryview(ids.astype("<i8").tobytes()), 8 * self.page_size, []
        for start in range(0, len(data) - size + 1, size):
            before = blake2b(data[start : start + size], key=before, digest_size=_BYTES).digest()
            keys.append(before)
        return keys
