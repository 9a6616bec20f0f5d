"""Host memory over disk as one prefix tier. Disk work is done by its own threads, from and to host memory.

Not here: who is evicted from the pool (the prefix tree), and when a request waits (the scheduler).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ..pages import Pages
from ..pool import KVPool
from .base import Fetch, Loads, TierStats
from .disk import DiskFolder
from .empty import NOTHING
from .host import HostTier
from .keys import PageKeys
from .rate import Rate
from .transfer import Transfers

logger = logging.getLogger(__name__)

MIN_TOKENS = 64
"""What is shorter is computed: launching copies and waiting for threads takes as long."""

_READERS = 8  # they mostly wait, and checksums and copies leave the others running
_WRITTEN_AT_ONCE = 32  # pages that the writer takes from host memory at a time
_REFRESH_S = 10.0  # how often the folder is looked through for other processes' files, while it is asked for any
_MEASURED_ROWS = 128  # a shorter prefill says nothing about the rate of long ones


class _Bringing:
    """See base.Fetch."""

    def __init__(self) -> None:
        self.done = False


class Tiers:
    """See base.PrefixTier. `memory` is the host's pool; without a `disk` there are no threads."""

    def __init__(
        self,
        *,
        naming: PageKeys,
        memory: KVPool,
        transfers: Transfers,
        disk: DiskFolder | None = None,
        batch: int = 1,
        headroom: int = 0,
    ) -> None:
        self.naming = naming
        self.batch = batch
        self.headroom = headroom
        self._page_bytes = memory.data[:, :, : memory.page_size].nbytes
        self._memory = memory
        self._transfers = transfers
        self._host = HostTier(memory, transfers)
        self._disk = disk
        self._dropped = 0
        self._unwritten: deque[bytes] = deque()
        self._fetching: dict[bytes, _Bringing] = {}
        self._ended = threading.Condition()
        self.disk_rate, self.prefill_rate = Rate(), Rate()  # bytes read, tokens computed
        self._refreshed = time.monotonic()
        self._closed = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tier-write")
        self._fetchers = ThreadPoolExecutor(2, thread_name_prefix="tier-fetch")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="tier-read")

    def put(self, keys: Sequence[bytes], pages: Pages) -> None:
        added = self._host.put(keys, pages)
        if self._disk is not None and added and self._disk.writable and not self._closed:
            self._unwritten.extend(added)
            self._background(self._writer, self._write)

    def claim(self, pages: Pages) -> None:
        self._transfers.claim(pages)

    def match(self, keys: Sequence[bytes]) -> int:
        count = self._host.match(keys)
        return count if count * self.naming.page_size >= MIN_TOKENS else 0

    def load(self, keys: Sequence[bytes], pages: Pages) -> int:
        return self._host.load(keys, pages)

    def loads(self) -> Loads:
        return self._transfers.loads()

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        if self._disk is None or self._closed:
            return NOTHING
        if time.monotonic() - self._refreshed > _REFRESH_S:
            self._refreshed = time.monotonic()
            self._background(self._writer, self.refresh)
        missing, reach = self._missing(self._disk, keys)
        if not self._pays(missing, reach):
            return NOTHING
        with self._ended:
            if missing[0] in self._fetching:
                return self._fetching[missing[0]]
            fetch = self._fetching[missing[0]] = _Bringing()
        self._background(self._fetchers, lambda: self._bring(missing, fetch))
        return fetch

    def wait(self, seconds: float) -> None:
        with self._ended:
            begun = len(self._fetching)
            self._ended.wait_for(lambda: len(self._fetching) < begun or not begun, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= _MEASURED_ROWS:
            self.prefill_rate.add(tokens, seconds)

    def stats(self) -> TierStats:
        host, disk = self._host, self._disk
        stored = {} if disk is None else {
            "disk_pages": disk.pages,
            "disk_bytes": disk.bytes,
            "disk_written_pages": disk.written,
            "disk_read_pages": disk.read_pages,
            "disk_damaged_pages": disk.damaged,
            "disk_dropped_pages": self._dropped,
            "disk_failures": disk.failures,
        }  # fmt: skip
        return TierStats(
            host_pages_total=host.pages,
            host_pages_cached=host.used,
            host_saved_pages=host.saved,
            host_loaded_pages=host.loaded,
            host_evicted_pages=host.evicted,
            **stored,
        )

    def close(self) -> None:
        self._closed = True
        for workers in (self._fetchers, self._readers, self._writer):
            workers.shutdown(cancel_futures=True)

    def refresh(self) -> None:
        """Look now for what others wrote to the folder; blocks on the file system."""
        if self._disk is not None:
            self._disk.refresh()

    def check(self) -> None:
        """Assert the invariants, while nothing is being read or written; for tests."""
        self._host.check()

    def quiet(self, seconds: float) -> bool:
        """Wait until nothing is left to write or fetch, at most `seconds`; whether that was enough."""
        ends = time.monotonic() + seconds
        while self._unwritten or self._fetching:
            if time.monotonic() > ends:
                return False
            time.sleep(0.001)
        self._writer.submit(int).result()
        return True

    def _missing(self, disk: DiskFolder, keys: Sequence[bytes]) -> tuple[list[bytes], int]:
        """The keys that the disk can add to those in memory, and how many leading keys are here with them."""
        missing = []
        for reach, key in enumerate(keys):
            if key in self._host:
                continue
            if len(missing) == self._host.pages // 2 or not disk.has(key):
                return missing, reach
            missing.append(key)
        return missing, len(keys)

    def _pays(self, missing: list[bytes], reach: int) -> bool:
        """Whether reading beats computing, as far as both have been measured. Memory's part costs neither way."""
        if len(missing) * self.naming.page_size < MIN_TOKENS:
            return False
        reading = self.disk_rate.seconds(len(missing) * self._page_bytes)
        computing = self.prefill_rate.seconds(reach * self.naming.page_size)
        if reading is None or computing is None or reading < computing:
            return True
        self.disk_rate.fade()
        return False

    def _background(self, workers: ThreadPoolExecutor, job: Callable[[], object]) -> None:
        workers.submit(_logged, job)

    @torch.inference_mode()
    def _write(self) -> None:
        """Write what was saved, as long as it is still in memory."""
        assert self._disk is not None
        while self._unwritten and not self._closed:
            some = [self._unwritten[number] for number in range(min(len(self._unwritten), _WRITTEN_AT_ONCE))]
            wanted = [key for key in some if not self._disk.has(key)]
            here, pages, mark = self._host.borrow(wanted)
            try:
                self._dropped += len(wanted) - len(here)
                mark.wait()
                for key, page in zip(here, pages.tolist(), strict=True):
                    self._disk.write(key, self._bytes_of(page))
            finally:
                self._host.release(pages)
                for _ in some:
                    self._unwritten.popleft()

    @torch.inference_mode()
    def _bring(self, keys: list[bytes], fetch: _Bringing) -> None:
        """Read pages into memory; those that are gone or damaged are left out."""
        began = time.monotonic()
        try:
            pages, mark = self._host.reserve(len(keys))
            mark.wait()
            keys = keys[: len(pages)]
            read = list(self._readers.map(self._read, keys, pages.tolist()))
            self._host.add([key for key, good in zip(keys, read, strict=True) if good], pages[read])
            self._host.release(pages[[not good for good in read]])
            self.disk_rate.add(self._page_bytes * len(keys), time.monotonic() - began)
        finally:
            with self._ended:
                self._fetching = {first: other for first, other in self._fetching.items() if other is not fetch}
                fetch.done = True
                self._ended.notify_all()

    @torch.inference_mode()
    def _read(self, key: bytes, page: int) -> bool:
        assert self._disk is not None
        data = self._disk.read(key)
        if data is None:
            return False
        view = self._view(page)
        view.copy_(torch.frombuffer(data, dtype=view.dtype).view(view.shape))
        return True

    def _bytes_of(self, page: int) -> memoryview:
        return self._view(page).contiguous().view(-1).view(torch.uint8).numpy().data

    def _view(self, page: int) -> torch.Tensor:
        size = self._memory.page_size
        return self._memory.data[:, :, page * size : (page + 1) * size]


def _logged(job: Callable[[], object]) -> None:
    """A failure in the background has nobody to tell but the log."""
    try:
        job()
    except Exception:
        logger.exception("the prefix cache's background work failed")
