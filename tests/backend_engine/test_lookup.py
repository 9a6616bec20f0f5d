"""The index of 3-grams against a plain search, however the tokens arrive."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from promptsluice.backend_engine.lookup import CHAIN, GRAM, LONGEST, Found, Ids, Lookup


def by_hand(ids: list[int]) -> Found | None:
    """Compare the end with every earlier place."""
    best, tried = None, 0
    for place in range(len(ids) - 1, GRAM - 1, -1):
        agreed = 0
        while agreed < min(place, LONGEST) and ids[place - 1 - agreed] == ids[-1 - agreed]:
            agreed += 1
        if agreed >= GRAM and tried < CHAIN:
            tried += 1
            if best is None or agreed > best.agreed:
                best = Found(place, agreed)
    return best


def array(ids: list[int]) -> Ids:
    return np.array(ids, dtype=np.int64)


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(1, 9), max_size=40))
def test_any_text_in_any_pieces_equals_a_plain_search(ids: list[int], pieces: list[int]) -> None:
    lookup, known = Lookup(), 0
    for piece in [*pieces, len(ids)]:
        known = min(known + piece, len(ids))
        lookup.extend(array(ids[:known]))
        assert lookup.find(array(ids[:known])) == by_hand(ids[:known])


def test_the_longest_agreement_wins_and_then_the_latest() -> None:
    lookup = Lookup()
    ids = array([9, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2, 3, 70, 9, 1, 2, 3])
    lookup.extend(ids)
    assert lookup.find(ids) == Found(4, 4)
    other = np.append(ids[:-4], array([5, 1, 2, 3]))
    again = Lookup()
    again.extend(other)
    assert again.find(other) == Found(14, 3)


def test_large_ids_do_not_collide() -> None:
    top = (1 << 21) - 1
    ids = array([top, top - 1, top, 5, top, top, top - 1, 6, top, top - 1, top])
    lookup = Lookup()
    lookup.extend(ids)
    assert lookup.find(ids) == Found(3, 3)
    with pytest.raises(AssertionError, match="too many bits"):
        Lookup().extend(array([1 << 21, 0, 0, 0]))
