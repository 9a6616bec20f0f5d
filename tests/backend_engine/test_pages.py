"""The page allocator's counts and its preference for consecutive pages."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.backend_engine.pages import PageAllocator


def test_a_run_of_pages_is_consecutive_and_grows_in_place() -> None:
    allocator = PageAllocator(64)
    first, second = allocator.alloc(4), allocator.alloc(4)
    assert np.diff(first).tolist() == np.diff(second).tolist() == [1, 1, 1]
    assert allocator.alloc(2, after=int(first[-1])).tolist() == [first[-1] + 1, first[-1] + 2]
    assert allocator.alloc(1, after=int(second[-1])).tolist() == [second[-1] + 1]


class Searching(PageAllocator):
    """Counts how often it looked at the whole pool."""

    searches = 0

    def _free_runs(self) -> tuple[np.ndarray, np.ndarray]:
        self.searches += 1
        return super()._free_runs()


def test_in_a_large_pool_sequences_have_room_to_grow_without_a_search_for_each() -> None:
    allocator = Searching(24_000)
    firsts = np.sort([allocator.alloc(8)[0] for _ in range(64)])
    assert firsts[0] == 0 and allocator.searches <= 16
    assert np.diff(firsts).min() >= 8 + 100, "some stand close together in a pool that is almost empty"
    assert 24_000 - firsts[-1] >= 108


def test_growing_into_the_room_behind_costs_the_next_one_no_search() -> None:
    """As a prompt does whose answer needs a page more, before the prompt comes again."""
    allocator = Searching(24_000)
    pages = allocator.alloc(128)
    for _ in range(40):
        grown = allocator.alloc(1, after=int(pages[-1]))
        assert grown.tolist() == [pages[-1] + 1]
        pages = np.concatenate((pages, grown))
        other = allocator.alloc(1)
        assert not np.isin(other, pages).any()
        allocator.check()
    assert allocator.searches <= 10


def test_a_run_that_ends_is_not_taken_for_longer_than_it_is() -> None:
    """Pages behind it may be free again when somebody grows past its end."""
    allocator = PageAllocator(2_000)
    tail = allocator.alloc(2_000)[1_500:]
    allocator.unref(np.arange(1_500, dtype=np.int32))
    first = allocator.alloc(10)
    allocator.unref(tail)
    while allocator.free:  # grows over all that is left
        first = np.concatenate((first, allocator.alloc(1, after=int(first[-1]))))
        allocator.check()
    assert len(np.unique(first)) == len(first) == 2_000


def test_a_long_sequence_is_not_put_where_it_has_no_room_to_grow() -> None:
    allocator = PageAllocator(16_000)
    for _ in range(3):
        allocator.alloc(8)
    pages = allocator.alloc(1_993)
    behind = np.arange(pages[-1] + 1, pages[-1] + 1 + 500, dtype=np.int32)
    assert pages[-1] + 500 < 16_000 and not allocator.refs(behind).any()


@pytest.mark.slow
def test_places_of_a_large_pool_are_nobody_elses_whatever_came_and_went() -> None:
    dice, allocator, owners = random.Random(5), PageAllocator(9_000), list[np.ndarray]()
    for _ in range(600):
        action = dice.random()
        if action < 0.5 and allocator.free >= 400:
            owners.append(allocator.alloc(dice.choice((1, 3, 40, 400))))
        elif action < 0.75 and owners:
            place = dice.randrange(len(owners))
            owners[place] = np.concatenate((owners[place], allocator.alloc(1, after=int(owners[place][-1]))))
        elif owners:
            allocator.unref(owners.pop(dice.randrange(len(owners))))
        held = np.concatenate([np.empty(0, np.int32), *owners])
        assert len(np.unique(held)) == len(held) == 9_000 - allocator.free
        allocator.check()


def test_fragments_are_used_when_no_run_is_long_enough() -> None:
    allocator = PageAllocator(8)
    pages = allocator.alloc(8)
    allocator.unref(pages[::2])
    assert allocator.alloc(4).tolist() == [0, 2, 4, 6]
    assert allocator.free == 0


def test_a_page_is_free_only_when_its_last_reference_goes() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(3)
    allocator.ref(pages[:2])
    allocator.unref(pages)
    assert allocator.free == 2
    allocator.unref(pages[:2])
    assert allocator.free == 4


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from(["alloc", "grow", "ref", "drop"]), st.integers(0, 9))))
def test_counts_agree_with_a_plain_dictionary(size: int, steps: list[tuple[str, int]]) -> None:
    allocator, owners = PageAllocator(size), list[np.ndarray]()
    for action, number in steps:
        if action == "alloc" and number <= allocator.free:
            owners.append(allocator.alloc(number))
        elif action == "grow" and owners and allocator.free and len(owners[-1]):
            owners[-1] = np.concatenate((owners[-1], allocator.alloc(1, after=int(owners[-1][-1]))))
        elif action == "ref" and owners:
            allocator.ref(owners[number % len(owners)])
            owners.append(owners[number % len(owners)])
        elif action == "drop" and owners:
            allocator.unref(owners.pop(number % len(owners)))
        counts = np.zeros(size, dtype=int)
        for pages in owners:
            np.add.at(counts, pages, 1)
        assert allocator.refs(np.arange(size, dtype=np.int32)).tolist() == counts.tolist()
        allocator.check()
