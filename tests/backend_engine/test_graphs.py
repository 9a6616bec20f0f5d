"""What graphs need of the host, as far as it can be tested without a GPU."""

import gc
import weakref

import pytest
from promptsluice.backend_engine.capture import uncollected


class Loop:
    """Only a collection ends it."""

    def __init__(self) -> None:
        self.myself = self


def test_nothing_is_collected_while_graphs_are_captured() -> None:
    before = weakref.ref(Loop())
    with uncollected():
        assert before() is None, "what could be collected is, first"
        during = weakref.ref(Loop())
        _ = [[number] for number in range(100_000)]  # enough to set a collection off
        assert during() is not None
    gc.collect()
    assert during() is None and gc.isenabled()


def test_collecting_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with pytest.raises(RuntimeError), uncollected():
            raise RuntimeError("no memory")
        assert not gc.isenabled()
    finally:
        gc.enable()
