"""The in-process pipeline: one background loop, built once, shared by threads and loops, released on close."""

import asyncio
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from promptsluice.gateway.inprocess import Optimizer, optimizer_for
from promptsluice.gateway.loop_thread import LoopThread
from promptsluice.policies import PolicySet

MESSAGES = [{"role": "user", "content": "filler a"}, {"role": "user", "content": "b"}]


async def identity(value: int) -> int:
    return value


def test_threads_and_loops_share_one_pipeline(optimizer: Optimizer, trimming: Any) -> None:
    async def many() -> None:
        await asyncio.gather(*(optimizer.aprepare(MESSAGES, policy="balanced") for _ in range(20)))

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(optimizer.prepare, MESSAGES, policy="balanced") for _ in range(20)]
        futures += [threads.submit(asyncio.run, many()) for _ in range(3)]
        for future in futures:
            future.result()
    assert trimming.builds == 1
    assert len(trimming.loops) == 1
    assert len(trimming.policies) == 80


def test_close_releases_and_the_next_call_builds_anew(trimming: Any) -> None:
    optimizer = Optimizer(build=trimming.build)
    optimizer.close()
    assert trimming.closes == 0
    optimizer.prepare(MESSAGES, policy="off")
    optimizer.close()
    optimizer.close()
    assert (trimming.builds, trimming.closes) == (1, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "promptsluice-loop"]
    with optimizer:
        optimizer.prepare(MESSAGES, policy="off")
    assert (trimming.builds, trimming.closes) == (2, 2)


def test_a_failed_build_is_tried_again(trimming: Any) -> None:
    async def flaky(policies: PolicySet) -> Any:
        trimming.builds += 1
        if trimming.builds == 1:
            raise OSError("the disk was away")
        return trimming

    with Optimizer(build=flaky) as optimizer:
        with pytest.raises(OSError, match="the disk was away"):
            optimizer.prepare(MESSAGES, policy="off")
        optimizer.prepare(MESSAGES, policy="off")


def test_configurations_are_shared_by_path_and_by_object(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    assert optimizer_for(file) is optimizer_for(str(file))
    assert optimizer_for(file) is not optimizer_for(tmp_path / "other.yaml")
    assert optimizer_for(None) is optimizer_for(None)
    policies = PolicySet.default()
    assert optimizer_for(policies) is optimizer_for(policies)
    own = Optimizer()
    assert optimizer_for(own) is own


def test_the_loop_refuses_to_wait_for_itself() -> None:
    loop = LoopThread()

    async def nested() -> int:
        return loop.run(identity(1))

    try:
        with pytest.raises(RuntimeError, match="wait for itself"):
            loop.run(nested())
        assert loop.run(identity(2)) == 2
    finally:
        loop.stop()


def test_stop_cancels_what_runs() -> None:
    loop = LoopThread()
    started = threading.Event()

    async def forever() -> None:
        started.set()
        await asyncio.get_running_loop().create_future()

    future = loop.submit(forever())
    started.wait()
    loop.stop()
    assert future.cancelled()
    assert not loop.running


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_its_own_loop(optimizer: Optimizer) -> None:
    optimizer.prepare(MESSAGES, policy="off")
    child = multiprocessing.get_context("fork").Process(
        target=optimizer.prepare, args=(MESSAGES,), kwargs={"policy": "off"}
    )
    child.start()
    child.join(20)
    alive = child.is_alive()
    child.kill()
    assert not alive
    assert child.exitcode == 0
