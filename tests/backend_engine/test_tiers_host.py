"""Host memory against a dictionary, with copies made as late as the order allows: right bytes, and nothing leaks."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from promptsluice.backend_engine.pool import KVPool
from promptsluice.backend_engine.spec import ModelSpec, spec_from_config
from promptsluice.backend_engine.tiers.host import HostTier
from promptsluice.backend_engine.tiers.transfer import Transfers

from .late import LateStream

SIZE = 2
SPEC: ModelSpec = spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)


@dataclass
class House:
    """A pool whose pages hold a number each, host memory of `host_pages`, and what was put there last."""

    host_pages: int
    pool: KVPool = field(default_factory=lambda: KVPool(SPEC, pages=12, page_size=SIZE))
    values: dict[bytes, float] = field(default_factory=dict)
    busy: list[np.ndarray] = field(default_factory=list)
    written: float = 0.0

    def __post_init__(self) -> None:
        memory = KVPool(SPEC, pages=self.host_pages, page_size=SIZE)
        self.transfers = Transfers(self.pool, memory, LateStream())
        self.host = HostTier(memory, self.transfers)
        self.memory = memory

    def compute(self, page: int) -> float:
        """What a step does to a page that is its own."""
        self.transfers.claim(np.array([page]))
        self.written += 1
        self.pool.data[:, :, page * SIZE : (page + 1) * SIZE] = self.written
        return self.written

    def put(self, keys: list[int], first: int) -> None:
        names = [bytes([key]) for key in keys]
        pages = (np.arange(first, first + len(keys)) % 12).astype(np.int32)
        for name, page in zip(names, pages.tolist(), strict=True):
            if name in self.values:  # equal keys, equal content
                self.transfers.claim(np.array([page]))
                self.pool.data[:, :, page * SIZE : (page + 1) * SIZE] = self.values[name]
            else:
                self.values[name] = self.compute(page)
        added = self.host.put(names, pages)
        assert set(added) <= set(names) and self.host.used <= self.host_pages
        for page in pages.tolist():
            self.compute(page)  # at once somebody else's

    def load(self, keys: list[int], first: int) -> None:
        names = [bytes([key]) for key in keys]
        pages = (np.arange(first, first + len(keys)) % 12).astype(np.int32)
        self.transfers.claim(pages)
        found = self.host.match(names)
        assert self.host.load(names, pages) == found
        loads = self.transfers.loads()
        for layer in range(SPEC.layers):
            loads.wait(layer)
            for name, page in zip(names[:found], pages.tolist(), strict=False):
                content = self.pool.data[layer, :, page * SIZE : (page + 1) * SIZE]
                assert (content == self.values[name]).all()

    def fetch(self, keys: list[int]) -> None:
        """What the disk's threads do."""
        pages, mark = self.host.reserve(len(keys))
        mark.wait()
        names = [bytes([key]) for key in keys][: len(pages)]
        for name, page in zip(names, pages.tolist(), strict=True):
            self.written += 1
            value = self.values.setdefault(name, self.written)
            self.memory.data[:, :, page * SIZE : (page + 1) * SIZE] = value
        self.host.add(names, pages)

    def borrow(self, keys: list[int]) -> None:
        """What the writer does; it takes its time to give the pages back."""
        here, pages, mark = self.host.borrow([bytes([key]) for key in keys])
        mark.wait()
        for name, page in zip(here, pages.tolist(), strict=True):
            assert (self.memory.data[:, :, page * SIZE : (page + 1) * SIZE] == self.values[name]).all()
        self.busy.append(pages)

    def end(self) -> None:
        for pages in self.busy:
            self.host.release(pages)
        self.host.check()


KEYS = st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 10),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["put", "load"]), KEYS, st.integers(0, 11)),
            st.tuples(st.sampled_from(["fetch", "borrow", "release"]), KEYS, st.none()),
        ),
        max_size=30,
    ),
)
def test_what_is_loaded_is_what_was_put(host_pages: int, steps: list[tuple]) -> None:
    house = House(host_pages)
    for action, keys, first in steps:
        if action == "put":
            house.put(keys, first)
        elif action == "load":
            house.load(keys, first)
        elif action == "fetch":
            house.fetch(keys)
        elif action == "borrow":
            house.borrow(keys)
        elif house.busy:
            house.host.release(house.busy.pop(0))
    house.end()


def test_what_comes_later_in_a_prefix_goes_first() -> None:
    house = House(4)
    house.put([1, 2, 3, 4], 0)
    house.put([5, 6], 4)
    assert [bytes([key]) in house.host for key in (1, 2, 3, 4, 5, 6)] == [True, True, False, False, True, True]
    house.load([1, 2], 0)
    house.put([7], 6)
    assert bytes([6]) not in house.host and bytes([5]) in house.host
    house.put([8, 9, 10, 11, 12, 13], 0)
    assert [bytes([key]) in house.host for key in range(8, 14)] == [True] * 4 + [False] * 2
    house.end()
