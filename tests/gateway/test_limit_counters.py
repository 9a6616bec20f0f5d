"""What counts for the limits: the counters of a process and those of a server keep the same contract."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from fakeredis import TcpFakeServer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from promptsluice.gateway.keys.counters import Amounts, Counters, MemoryCounters, Place, Taken
from promptsluice.gateway.keys.guarded import GuardedCounters
from promptsluice.gateway.keys.key_metrics import KeyMetrics
from promptsluice.gateway.keys.limits import Limit
from promptsluice.gateway.keys.shared import SharedCounters, Step, connect
from promptsluice.prompt import ConfigError, Overloaded

HOUR_S = 3600.0


def limit(most: int, *, period_s: float = HOUR_S, sliding: bool = True, name: str = "one") -> Limit:
    return Limit(name=name, what="tokens", most=most, period_s=period_s, sliding=sliding)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.block_on_close = False  # a test that failed may have left a connection
    server.server_close()
    thread.join()


def shared_at(url: str, **options: float) -> SharedCounters:
    return SharedCounters(connect(url, password=None, timeout_s=30), **options)


@pytest.fixture(params=["memory", "shared"])
async def counters(request: pytest.FixtureRequest) -> AsyncIterator[Counters]:
    if request.param == "memory":
        yield MemoryCounters()
        return
    url = request.getfixturevalue("url")
    client = connect(url, password=None, timeout_s=30)
    await client.flushall()
    await client.aclose()
    made = shared_at(url)
    yield made
    await made.close()


async def settled(counters: Counters) -> None:
    """What was finished has been entered, too."""
    await counters.take("nobody", [(limit(1, name="nothing"), 0)])


async def test_what_is_taken_is_gone_until_it_is_given_back(counters: Counters) -> None:
    ten = limit(10)
    first = await counters.take("a", [(ten, 7)])
    assert first.ok and first.levels[0].remaining == 3 and 0 < first.levels[0].reset_s <= HOUR_S
    second = await counters.take("a", [(ten, 4)])
    assert second.short == ten and second.wait_s is not None and 0 < second.wait_s <= HOUR_S
    assert (await counters.take("b", [(ten, 4)])).ok, "another's limits are another's"
    first.counters.finish("a", [(ten, -5)])
    await settled(counters)
    third = await counters.take("a", [(ten, 8)])
    assert third.ok and third.levels[0].remaining == 0
    third.counters.finish("a", [(ten, 5)])
    await settled(counters)
    over = await counters.take("a", [(ten, 1)])
    assert over.short == ten and over.levels[0].spent > 14 and over.levels[0].remaining == 0


async def test_all_or_nothing(counters: Counters) -> None:
    wide, narrow = limit(100, name="wide"), limit(5, name="narrow", sliding=False)
    refused = await counters.take("a", [(wide, 50), (narrow, 6)], Place(id="p", most=1))
    assert refused.short == narrow and refused.wait_s is None, "that can never be"
    assert (await counters.take("a", [(wide, 100), (narrow, 5)], Place(id="q", most=1))).ok
    assert (await counters.take("a", [(wide, 1)])).short == wide


async def test_nothing_is_taken_yet_something_must_be_left(counters: Counters) -> None:
    two = limit(2)
    for _ in range(3):
        assert (await counters.take("a", [(two, 0)])).ok
    assert (await counters.take("a", [(two, 2)])).ok
    assert (await counters.take("a", [(two, 0)])).short == two


async def test_places(counters: Counters) -> None:
    places = [Place(id=name, most=2) for name in "pqr"]
    taken = [await counters.take("a", (), place) for place in places]
    assert [one.ok for one in taken] == [True, True, False] and taken[2].crowded
    assert (await counters.take("b", (), places[2])).ok
    for _ in range(2):  # leaving twice frees one place
        counters.finish("a", (), places[0])
        await settled(counters)
    assert (await counters.take("a", (), places[2])).ok
    assert (await counters.take("a", (), places[0])).crowded


async def test_what_slides_comes_back_by_itself(counters: Counters) -> None:
    soon = limit(1, period_s=0.02)
    for _ in range(3):
        while not (await counters.take("a", [(soon, 1)])).ok:  # noqa: ASYNC110 - time is what it takes
            await asyncio.sleep(0.005)


async def test_many_at_once_never_get_more_than_there_is(counters: Counters) -> None:
    some = limit(20)
    taken = await asyncio.gather(
        *(counters.take("a", [(some, 3)], Place(id=str(number), most=5)) for number in range(40))
    )
    assert sum(one.ok for one in taken) == 5
    taken = await asyncio.gather(*(counters.take("b", [(some, 3)]) for _ in range(40)))
    assert sum(one.ok for one in taken) == 6


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def test_minutes_slide_and_days_begin_at_midnight() -> None:
    clock = Clock(86_400 * 100 + 23 * 3600)
    counters = MemoryCounters(clock=clock)
    minute, day = limit(60, period_s=60, name="minute"), limit(100, period_s=86_400, sliding=False, name="day")
    taken = await counters.take("a", [(minute, 60), (day, 60)])
    assert [level.reset_s for level in taken.levels] == [60, 3600]
    clock.now += 10
    refused = await counters.take("a", [(minute, 20), (day, 20)])
    assert refused.short == minute and refused.wait_s == 10
    assert (await counters.take("a", [(minute, 10), (day, 40)])).ok
    refused = await counters.take("a", [(day, 1)])
    assert refused.short == day and refused.wait_s == 3590
    clock.now += 3590
    assert (await counters.take("a", [(day, 100)])).ok
    assert (await counters.take("a", [(minute, 60)])).ok
    clock.now -= 86_400  # a clock that is set back gives nothing, and holds nobody up
    assert (await counters.take("a", [(minute, 1)])).short == minute
    clock.now += 60
    assert (await counters.take("a", [(minute, 60)])).ok


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-30, 30), st.floats(0, 90)), max_size=30))
def test_a_minute_never_lets_through_more_than_twice_its_limit(steps: list[tuple[int, int, float]]) -> None:
    """A full bucket, and what comes back meanwhile; corrections downwards are of what was taken only."""

    async def run() -> None:
        clock, most = Clock(1000.0), 40
        counters, one = MemoryCounters(clock=clock), limit(40, period_s=60)
        let: list[tuple[float, int]] = []
        for wanted, correction, pause in steps:
            taken = await counters.take("a", [(one, wanted)])
            assert taken.ok == (taken.short is None) and 0 <= taken.levels[0].remaining <= most
            if taken.ok:
                correction = max(correction, -wanted)
                counters.finish("a", [(one, correction)])
                let.append((clock.now, wanted + min(0, correction)))
            clock.now += pause
        for at, _ in let:
            assert sum(amount for when, amount in let if at <= when < at + 60) <= 2 * most

    asyncio.run(run())


@pytest.mark.slow
async def test_a_burst_on_a_server_that_was_started_again(url: str) -> None:
    client: Any = connect(url, password=None, timeout_s=30)
    counters, some = shared_at(url), limit(70, name="burst")
    for _ in range(2):
        await client.script_flush()
        await client.delete("promptsluice:limits:{burst}:spent")
        taken = await asyncio.gather(*(counters.take("burst", [(some, 1)]) for _ in range(600)))
        assert sum(one.ok for one in taken) == 70
    await client.aclose()
    await counters.close()


async def test_who_leaves_before_the_answer_has_taken_nothing(url: str) -> None:
    counters, ten = shared_at(url), limit(10, name="left", sliding=False)
    asked = asyncio.create_task(counters.take("left", [(ten, 10)], Place(id="p", most=1)))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await settled(counters)
    await settled(counters)
    assert (await counters.take("left", [(ten, 10)], Place(id="q", most=1))).ok
    await counters.close()


async def test_gateways_count_together(url: str) -> None:
    one, other = shared_at(url), shared_at(url)
    three = limit(3, name="together")
    assert (await one.take("together", [(three, 2)], Place(id="p", most=1))).ok
    assert (await other.take("together", [(three, 2)])).short == three
    assert (await other.take("together", (), Place(id="q", most=1))).crowded
    assert (await other.take("together", [(three, 1)])).ok
    await one.close()
    await other.close()


async def test_places_of_a_gateway_that_died_come_free_and_others_are_renewed(url: str) -> None:
    living, dead = shared_at(url, held_s=0.3, renewed_s=0.05), shared_at(url, held_s=0.3, renewed_s=HOUR_S)
    assert (await living.take("renewed", (), Place(id="alive", most=2))).ok
    assert (await dead.take("renewed", (), Place(id="dead", most=2))).ok
    while not (await living.take("renewed", (), Place(id="new", most=2))).ok:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    client: Any = connect(url, password=None, timeout_s=30)
    # In the order of their ends, which a renewal in between changes.
    assert set(await client.zrange("promptsluice:limits:{renewed}:places", 0, -1)) == {b"alive", b"new"}
    assert await client.ttl("promptsluice:limits:{renewed}:places") <= 2
    await client.aclose()
    await living.close()
    await dead.close()


async def test_places_that_nobody_could_renew_are_held_again(url: str) -> None:
    client: Any = connect(url, password=None, timeout_s=30)
    counters, places = shared_at(url, renewed_s=0.02), "promptsluice:limits:{lost}:places"
    for name in ("running", "left"):
        assert (await counters.take("lost", (), Place(id=name, most=2))).ok
    await client.delete(places)  # as after an outage
    counters.finish("lost", (), Place(id="left", most=2))
    while await client.zrange(places, 0, -1) != [b"running"]:  # noqa: ASYNC110 - renewed by itself
        await asyncio.sleep(0.005)
    assert (await counters.take("lost", (), Place(id="late", most=1))).crowded
    await client.aclose()
    await counters.close()


async def test_the_server_remembers_a_step_for_longer_than_it_is_tried_again(url: str) -> None:
    client: Any = connect(url, password=None, timeout_s=30)
    counters = shared_at(url)
    await counters.take("remembered", [(limit(10), 1)])
    assert 590 <= await client.ttl("promptsluice:limits:{remembered}:steps") <= 601
    await client.aclose()
    await counters.close()


async def test_what_was_taken_before_the_server_was_emptied_is_not_given_back(url: str) -> None:
    client: Any = connect(url, password=None, timeout_s=30)
    counters, much = shared_at(url), limit(1000, sliding=False)
    first = await counters.take("emptied", [(much, 600)])
    await client.delete("promptsluice:limits:{emptied}:spent")  # as by a restart
    second = await counters.take("emptied", [(much, 400)])
    counters.finish("emptied", [(much, -500)], epoch=first.epoch)
    assert await spent(counters, "emptied", much) == 400
    counters.finish("emptied", [(much, 50)], epoch=first.epoch)
    counters.finish("emptied", [(much, -300)], epoch=second.epoch)
    assert await spent(counters, "emptied", much) == 150, "what more was used counts, and what is there comes back"
    await client.aclose()
    await counters.close()


async def test_what_is_kept_in_the_server_goes_by_itself(url: str) -> None:
    counters = shared_at(url)
    await counters.take("short", [(limit(10, period_s=60, name="minute"), 5)])
    await counters.take("long", [(limit(10, period_s=86_400, sliding=False, name="day"), 5)])
    client: Any = connect(url, password=None, timeout_s=30)
    assert 25 <= await client.ttl("promptsluice:limits:{short}:spent") <= 31
    assert 0 < await client.ttl("promptsluice:limits:{long}:spent") <= 86_401
    await client.aclose()
    await counters.close()


class Cutting:
    """Stands between gateways and the server: lets `swallowed` answers of it vanish with their connection, and nobody
    in while it is `away`.
    """

    def __init__(self, url: str) -> None:
        self._target = int(url.rpartition(":")[2].partition("/")[0])
        self.swallowed, self.away = 0, False
        self._ended: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        await asyncio.gather(*self._ended)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._ended.add(task)
        if not self.away:
            inner, outer = await asyncio.open_connection("127.0.0.1", self._target)
            asking = asyncio.create_task(self._pass(reader, outer))
            await self._pass(inner, writer, answers=True)
            asking.cancel()
            await asyncio.wait({asking})
            outer.close()
        writer.close()

    async def _pass(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, answers: bool = False) -> None:
        while data := await source.read(1 << 16):
            if answers and (self.swallowed or self.away):
                self.swallowed -= bool(self.swallowed)
                return
            to.write(data)
        to.write_eof()


@pytest.fixture
async def cutting(url: str) -> AsyncIterator[tuple[Cutting, SharedCounters, SharedCounters]]:
    """Counters that go through it, with a connection that is open already, and such as do not."""
    between, direct = Cutting(url), shared_at(url)
    async with between.open() as through:
        counters = shared_at(through, again_s=0.01)
        await settled(counters)
        yield between, counters, direct
        await counters.close()
    await direct.close()


async def spent(counters: Counters, subject: str, of: Limit) -> float:
    return (await counters.take(subject, [(of, 0)])).levels[0].spent


async def test_what_was_done_is_not_done_again_on_a_new_connection(
    cutting: tuple[Cutting, SharedCounters, SharedCounters],
) -> None:
    between, counters, direct = cutting
    ten = limit(10, sliding=False)
    between.swallowed = 1
    taken = await counters.take("cut", [(ten, 7)], Place(id="p", most=1))
    assert taken.ok and taken.levels[0].spent == 7 and between.swallowed == 0
    assert (await direct.take("cut", (), Place(id="q", most=1))).crowded
    between.swallowed = 1
    counters.finish("cut", [(ten, -4)], Place(id="p", most=1))
    await settled(counters)
    assert between.swallowed == 0 and await spent(direct, "cut", ten) == 3


async def test_what_nobody_heard_of_is_undone_if_it_was_done(
    cutting: tuple[Cutting, SharedCounters, SharedCounters],
) -> None:
    between, counters, direct = cutting
    ten = limit(10, sliding=False)
    assert (await direct.take("undone", [(ten, 1)])).ok
    between.swallowed = 2
    with pytest.raises(Exception, match=r"closed|Connection"):
        await counters.take("undone", [(ten, 7)], Place(id="p", most=1))
    between.away = True
    with pytest.raises(Exception, match=r"closed|Connection"):
        await counters.take("undone", [(ten, 7)])
    between.away = False
    while await spent(direct, "undone", ten) != 1:  # noqa: ASYNC110 - what is held is sent by itself
        await asyncio.sleep(0.01)
    assert (await direct.take("undone", (), Place(id="q", most=1))).ok
    await counters.close()
    assert await spent(direct, "undone", ten) == 1, "and nothing is given back that was not taken"


@pytest.mark.slow
async def test_corrections_wait_for_a_server_that_is_away(
    cutting: tuple[Cutting, SharedCounters, SharedCounters],
) -> None:
    between, counters, direct = cutting
    much = limit(1000, sliding=False)
    assert (await counters.take("owed", [(much, 900)])).ok
    between.away = True
    for _ in range(300):
        counters.finish("owed", [(much, -2)])
    for _ in range(3):
        with pytest.raises(Exception, match=r"closed|Connection"):
            await settled(counters)
    assert await spent(direct, "owed", much) > 300, "what was on its way was done, though nobody heard of it"
    between.away = False
    while await spent(direct, "owed", much) != 300:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await settled(counters)
    assert await spent(direct, "owed", much) == 300


async def test_what_is_owed_is_paid_at_the_end(cutting: tuple[Cutting, SharedCounters, SharedCounters]) -> None:
    between, counters, direct = cutting
    ten = limit(10, sliding=False)
    assert (await counters.take("closing", [(ten, 7)])).ok
    between.swallowed = 2
    counters.finish("closing", [(ten, -4)])
    await counters.close()
    assert await spent(direct, "closing", ten) == 3


def test_a_correction_that_comes_late_leaves_what_came_back_by_itself() -> None:
    minute, day = limit(600, period_s=60), limit(600, period_s=86_400, sliding=False, name="day")
    step = Step(subject="a", amounts=[(minute, -100), (day, -100), (minute, 50)], place=None, at=86_400 * 10 + 5.0)
    assert [amount for _, amount in step.later(step.at + 4).amounts] == [-60, -100, 10]
    assert [amount for _, amount in step.later(step.at + 86_400).amounts] == [0, 0, 0]
    assert step.later(step.at + 4).id == step.id
    assert step.later(step.at + 4).age_s < 60, "whatever the clock on the wall reads"


class Fickle(Counters):
    """Fails when told to."""

    def __init__(self) -> None:
        self.fails, self.asked = True, 0

    async def take(self, subject: str, amounts: Amounts, place: Place | None = None) -> Taken:
        self.asked += 1
        if self.fails:
            raise TimeoutError
        return Taken(counters=self, levels=())

    def finish(self, subject: str, amounts: Amounts, place: Place | None = None, *, epoch: str = "") -> None: ...


def guarded(shared: Counters, fail: Literal["open", "closed"], clock: Clock) -> tuple[GuardedCounters, Any]:
    registry = CollectorRegistry()
    return GuardedCounters(shared, fail=fail, metrics=KeyMetrics(registry), clock=clock), registry.get_sample_value


async def test_open_each_process_counts_by_itself_while_the_server_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    shared, clock = Fickle(), Clock(0.0)
    counters, sample = guarded(shared, "open", clock)
    two = limit(2)
    taken = [await counters.take("a", [(two, 1)]) for _ in range(3)]
    assert [one.ok for one in taken] == [True, True, False] and shared.asked == 1
    assert "each gateway counts by itself" in caplog.text
    assert sample("promptsluice_limit_counters_up") == 0 and sample("promptsluice_limit_counters_failures_total") == 1
    taken[0].counters.finish("a", [(two, -1)])
    assert (await counters.take("a", [(two, 1)])).ok, "what was counted here is corrected here"
    shared.fails, clock.now = False, 5.0
    assert (await counters.take("a", [(two, 1)])).counters is shared
    assert "answers again" in caplog.text and sample("promptsluice_limit_counters_up") == 1


async def test_closed_nobody_is_let_in_while_the_server_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    counters, sample = guarded(Fickle(), "closed", Clock(0.0))
    for _ in range(2):
        with pytest.raises(Overloaded) as refused:
            await counters.take("a", [(limit(2), 1)])
        assert refused.value.headers["retry-after"] == "5"
    assert sample("promptsluice_limit_counters_up") == 0 and caplog.text.count("are refused") == 1


async def test_a_server_that_is_gone_is_an_error_within_the_timeout() -> None:
    counters = SharedCounters(connect("redis://127.0.0.1:9/0", password=None, timeout_s=0.2))
    with pytest.raises(Exception, match=r"Error|refused"):
        await counters.take("a", [(limit(1), 1)])
    counters.finish("a", [(limit(1), 1)], Place(id="p", most=1))
    await counters.close()


def test_a_url_of_another_kind() -> None:
    with pytest.raises(ConfigError, match=r"server\.counters\.url"):
        connect("http://127.0.0.1", password=None, timeout_s=1)


@pytest.mark.parametrize(
    ("sliding", "period", "held_s", "standing"),
    [
        (True, 60.0, 0.0, 600),
        (True, 60.0, 30.0, 100),
        (True, 60.0, 90.0, 0),
        (False, 60.0, 5.0, 600),
        (False, 60.0, 50.0, 0),
    ],
)
def test_what_has_come_back_by_itself_is_not_given_back_again(
    sliding: bool, period: float, held_s: float, standing: int
) -> None:
    limit = Limit(name="tokens_per_minute", what="tokens", most=1000, period_s=period, sliding=sliding)
    assert limit.standing(600, 30.0, 30.0 + held_s) == standing
