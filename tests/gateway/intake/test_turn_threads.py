"""Threads that run the turns of several tenants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from plait.backends.errors import LimitError
from plait.gateway.intake.turns import Steps, TurnThreads


def worth(count: int, log: list[str], name: str, gate: Callable[[], object] = lambda: None) -> Steps[str]:
    for _ in range(count):
        gate()
        log.append(name)
        yield
    return name


async def test_a_short_job_does_not_wait_for_another_tenants_long_ones() -> None:
    log: list[str] = []
    threads = TurnThreads(1, "test")
    long = [asyncio.create_task(threads.run("a", worth(50, log, "long"), 1)) for _ in range(12)]
    await asyncio.sleep(0)
    assert await threads.run("b", worth(2, log, "short"), 1) == "short"
    assert log.count("long") < 10
    assert await asyncio.gather(*long) == ["long"] * 12


async def test_a_job_raises_what_it_raises() -> None:
    def fails() -> Steps[str]:
        yield
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        await TurnThreads(2, "test").run("a", fails(), 1)


async def test_a_job_whose_caller_is_gone_ends_after_its_turn() -> None:
    log: list[str] = []
    gate = threading.Semaphore(0)
    threads = TurnThreads(1, "test", ThreadPoolExecutor(1))
    first = asyncio.create_task(threads.run("a", worth(50, log, "first", gate.acquire), 1))
    second = asyncio.create_task(threads.run("a", worth(50, log, "second"), 1))
    await asyncio.sleep(0.01)
    for task in (first, second):
        task.cancel()
    gate.release()
    await asyncio.gather(first, second, return_exceptions=True)
    assert await threads.run("a", worth(1, log, "third"), 1) == "third"
    assert log == ["first", "third"]


async def test_what_waits_is_bounded_and_a_tenant_below_its_share_is_served() -> None:
    threads = TurnThreads(2, "test", max_bytes=100)
    gate = threading.Semaphore(0)
    first = asyncio.create_task(threads.run("a", worth(1, [], "first", gate.acquire), 100))
    await asyncio.sleep(0)
    with pytest.raises(LimitError) as caught:
        await threads.run("a", worth(1, [], "second"), 1)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    assert await threads.run("b", worth(1, [], "other"), 50) == "other"
    with pytest.raises(LimitError, match=r"100 bytes .* 0 of them of this key"):
        await threads.run("b", worth(1, [], "above its share"), 51)
    gate.release()
    await first
    assert await threads.run("a", worth(1, [], "third"), 100) == "third"


def test_all_threads_run_from_the_beginning() -> None:
    threads = TurnThreads(3, "counted")
    assert sum(thread.name.startswith("counted_") for thread in threading.enumerate()) == 3
    del threads
