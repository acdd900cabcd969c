"""Turns against an oracle, and the threads that run them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import LimitError
from plait.gateway.calls.turns import Steps, Turns, TurnThreads


def test_tenants_take_turns_and_so_do_their_jobs() -> None:
    turns: Turns[str] = Turns(1)
    for job in ("a1", "a2", "a3", "b1", "b2"):
        turns.add(job[0], job)
    order = []
    while (taken := turns.take()) is not None:
        order.append(taken[1])
        turns.done(taken[0])
    assert order == ["a1", "b1", "a2", "b2", "a3"]


def test_one_tenant_never_has_all_seats() -> None:
    turns: Turns[str] = Turns(3)
    for job in ("a1", "a2", "a3"):
        turns.add("a", job)
    assert [turns.take(), turns.take(), turns.take()] == [("a", "a1"), ("a", "a2"), None]
    turns.add("b", "b1")
    assert turns.take() == ("b", "b1")
    assert repr(turns) == "Turns(waiting={'a': 1}, seated={'a': 2, 'b': 1})"


def test_a_job_that_waits_can_be_forgotten() -> None:
    turns: Turns[str] = Turns(1)
    turns.add("a", "a1")
    turns.remove("a", "a1")
    turns.remove("a", "a1")
    assert turns.take() is None


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "done", "remove"])), max_size=60),
)
def test_no_tenant_waits_for_more_than_one_turn_of_each_other(seats: int, events: list[tuple[str, str]]) -> None:
    """Counts, for each tenant that waits and may have a seat, the turns that others got meanwhile."""
    turns: Turns[int] = Turns(seats)
    waiting: dict[str, list[int]] = {tenant: [] for tenant in "abc"}
    seated = dict.fromkeys("abc", 0)
    passed_over: dict[str, list[str]] = {tenant: [] for tenant in "abc"}
    most = max(1, seats - 1)
    for number, (tenant, event) in enumerate(events):
        if event == "add":
            turns.add(tenant, number)
            waiting[tenant].append(number)
        elif event == "remove" and waiting[tenant]:
            turns.remove(tenant, waiting[tenant].pop())
            passed_over[tenant] = passed_over[tenant] if waiting[tenant] else []
        elif event == "done" and seated[tenant]:
            turns.done(tenant)
            seated[tenant] -= 1
        elif event == "take":
            may = {one for one in "abc" if waiting[one] and seated[one] < most and sum(seated.values()) < seats}
            taken = turns.take()
            assert (taken is not None) == bool(may)
            if taken is not None:
                whose, job = taken
                assert whose in may
                assert job == waiting[whose].pop(0)
                seated[whose] += 1
                passed_over[whose] = []
                for other in may - {whose}:
                    passed_over[other].append(whose)
                    assert len(set(passed_over[other])) == len(passed_over[other])


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
