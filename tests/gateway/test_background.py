"""What a backend does in the background: jobs first, lessons in idle time, and neither at the other's cost."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from promptsluice.gateway.backends.background import Background, Lesson

LONG_S = 3600.0


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background("a test")
    yield made
    made.close()


def lesson(
    job: Callable[[], object],
    *,
    idle: Callable[[], bool] = lambda: False,
    wait_s: float = LONG_S,
    anyway: bool = False,
    about: str = "",
) -> Lesson:
    """`about`: a letter for each thing."""
    return Lesson(job=job, idle=idle, until=time.monotonic() + wait_s, anyway=anyway, about=frozenset(about))


def drained(background: Background) -> None:
    while background.unfinished:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("idle", "anyway", "wait_s", "done"),
    [([True], False, LONG_S, 1), ([False, False, True], False, LONG_S, 1), ([], False, 0, 0), ([], True, 0, 1)],
)
def test_idle_time_is_waited_for_and_a_busy_engine_learns_only_what_it_must(
    background: Background, idle: list[bool], anyway: bool, wait_s: float, done: int
) -> None:
    looks, did = iter(idle), list[str]()
    background.learn(lesson(lambda: did.append("done"), idle=lambda: next(looks, False), wait_s=wait_s, anyway=anyway))
    drained(background)
    assert len(did) == done


def test_what_must_be_done_is_done_before_the_end_and_once() -> None:
    background, started, go, did = Background("a test"), threading.Event(), threading.Event(), list[str]()

    def computing() -> None:
        started.set()
        assert go.wait(60)

    def failing() -> None:
        raise ValueError("no more disk")

    background.run(lambda: did.append("deleted before"), must=True)
    background.run(computing)
    background.run(lambda: did.append("computed"))
    for job in (partial(did.append, "deleted"), failing, partial(did.append, "deleted, too")):
        background.run(job, must=True)
    assert started.wait(60)
    background.close()
    background.settle()
    assert did == ["deleted before", "deleted", "deleted, too"], "what is being computed is not waited for"
    background.run(lambda: did.append("late"), must=True)
    go.set()
    background.settle()
    drained(background)
    assert did == ["deleted before", "deleted", "deleted, too"]


def test_jobs_do_not_wait_for_lessons(background: Background) -> None:
    done, learned, quiet = threading.Event(), threading.Event(), threading.Event()
    for _ in range(1000):
        background.learn(lesson(learned.set, idle=quiet.is_set))
    background.run(done.set)
    assert done.wait(60) and not learned.is_set(), "though each lesson could wait for an hour"
    assert background.unfinished < 100, "the oldest lessons are forgotten"
    quiet.set()
    drained(background)
    assert learned.is_set()


def test_lessons_that_need_not_be_done_make_room_first(background: Background) -> None:
    quiet, done = threading.Event(), list[str]()
    for number in range(100):
        for name, anyway in (("needed", number < 40), ("better", False)):
            job = partial(done.append, f"{name} {number}")
            background.learn(lesson(job, idle=quiet.is_set, anyway=anyway))
    quiet.set()
    drained(background)
    assert done[:40] == [f"needed {number}" for number in range(40)], "the oldest of all, and yet not forgotten"
    assert done[40:] == [f"{name} {number}" for number in range(88, 100) for name in ("needed", "better")]
    quiet.clear()
    for number in range(100):
        background.learn(lesson(partial(done.append, f"{number}"), idle=quiet.is_set, anyway=True))
    quiet.set()
    drained(background)
    assert done[64:] == [f"{number}" for number in range(36, 100)]


def test_a_lesson_about_what_waits_already_is_not_queued(background: Background) -> None:
    quiet, done = threading.Event(), list[str]()
    for name, about, anyway in (
        ("first", "ab", False),
        ("same", "ab", False),
        ("part", "b", False),
        ("more", "bc", False),
        ("of both", "ac", False),
        ("needed", "a", True),
        ("needed again", "a", True),
        ("unnamed", "", False),
        ("unnamed again", "", False),
    ):
        background.learn(lesson(partial(done.append, name), idle=quiet.is_set, anyway=anyway, about=about))
    quiet.set()
    drained(background)
    assert done == ["same", "more", "needed again", "unnamed", "unnamed again"]
    background.learn(lesson(partial(done.append, "later"), idle=quiet.is_set, about="ab"))
    drained(background)
    assert done[-1] == "later"


def test_a_lesson_that_comes_again_waits_no_longer_for_that(background: Background) -> None:
    quiet, done = threading.Event(), list[str]()
    background.learn(lesson(lambda: done.append("old"), wait_s=0.2, anyway=True, about="a"))
    background.learn(lesson(lambda: done.append("other"), idle=quiet.is_set, about="b"))
    background.learn(lesson(lambda: done.append("new"), anyway=True, about="ac"))
    while not done:
        time.sleep(0.001)
    assert done == ["new"], "which knows what was deleted since the old one came"
    quiet.set()
    drained(background)
    assert done == ["new", "other"]


def test_what_must_be_done_finds_room(background: Background) -> None:
    go, done = threading.Event(), list[str]()
    background.run(go.wait)
    for _ in range(1000):
        background.run(lambda: done.append("some time"))
    background.run(lambda: done.append("must"), must=True)
    go.set()
    drained(background)
    assert done[-1] == "must" and len(done) < 1000


def test_a_lesson_that_fails_leaves_the_others(background: Background, caplog: pytest.LogCaptureFixture) -> None:
    learned = threading.Event()
    background.learn(lesson(lambda: 1 // 0, idle=lambda: True))
    background.learn(lesson(learned.set, idle=lambda: True))
    drained(background)
    assert learned.is_set() and "ZeroDivisionError" in caplog.text


def test_the_end_does_not_wait_for_lessons() -> None:
    others, background = set(threading.enumerate()), Background("a test")
    background.learn(lesson(lambda: None))
    background.close()
    background.learn(lesson(lambda: None))
    background.run(lambda: None, must=True)
    for thread in set(threading.enumerate()) - others:
        thread.join()
