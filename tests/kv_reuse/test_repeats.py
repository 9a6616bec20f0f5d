"""Beginnings of prompts are known again by tenant, counted, and bounded."""

import random
import threading

from promptsluice.kv_reuse.repeats import BLOCK, Beginnings, Sight, marks_of


def text(seed: int, tokens: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(50_000) for _ in range(tokens))


def test_the_longest_common_beginning_is_found_with_its_count() -> None:
    served, system, turn = Beginnings(), text(1, 3 * BLOCK), text(2, 4 * BLOCK + 5)
    for seed in (3, 4):
        served.add(marks_of((*system, *text(seed, 2 * BLOCK)), tenant="a"))
    served.add(marks_of((*system, *turn), tenant="a"))
    follow_up = (*system, *turn, *text(5, 70))
    assert served.sights(marks_of(follow_up, tenant="a")) == [Sight(3 * BLOCK, 3), Sight(7 * BLOCK, 1)]
    assert served.sights(marks_of(follow_up, tenant="b")) == []
    assert served.sights(marks_of((7, *follow_up), tenant="a")) == []
    assert served.sights(marks_of(system[: BLOCK - 1], tenant="a")) == []


def test_ends_that_were_not_seen_for_long_are_forgotten_first() -> None:
    served, old, new = Beginnings(most=8), text(1, 5 * BLOCK), text(2, 6 * BLOCK)
    served.add(marks_of(old, tenant=""))
    served.add(marks_of(new, tenant=""))
    assert len(served) == 8
    assert served.sights(marks_of(old, tenant="")) == [Sight(2 * BLOCK, 1)]
    assert served.sights(marks_of(new, tenant="")) == [Sight(6 * BLOCK, 1)]
    served.add(marks_of(text(3, 100 * BLOCK), tenant=""))
    assert len(served) == 8 and served.sights(marks_of(new, tenant="")) == []


def test_what_was_prefilled_in_full_is_counted_anew() -> None:
    served, system = Beginnings(), text(1, 2 * BLOCK)
    prompts = [marks_of((*system, *text(seed, 2 * BLOCK)), tenant="") for seed in (2, 3)]
    for marks in prompts:
        served.add(marks)
    served.forget(prompts[0])
    assert [served.sights(marks) for marks in prompts] == [[], []]
    served.add(prompts[1])
    assert served.sights(prompts[0]) == [Sight(2 * BLOCK, 1)]


def test_threads_lose_no_count() -> None:
    served, marks = Beginnings(), marks_of(text(1, 10 * BLOCK), tenant="")
    threads = [threading.Thread(target=lambda: [served.add(marks) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served.sights(marks) == [Sight(10 * BLOCK, 800)]
