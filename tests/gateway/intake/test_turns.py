"""Turns against an oracle, and requests that begin in turns while the event loop is busy."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import LimitError
from plait.gateway.intake import turns as module
from plait.gateway.intake.turns import FEWEST, MOST, STANDING_S, LoopTurns, Turns


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


def test_late_jobs_go_if_they_are_of_tenants_with_at_least_an_equal_part() -> None:
    turns: Turns[str] = Turns(1)
    for job in ("a1", "b1", "b2", "b3", "c1", "c2"):
        turns.add(job[0], job)
    assert turns.expire(lambda job: job != "b3", 9) == ["b1", "b2", "c1", "c2"]
    assert turns.length == 2
    assert sorted(turns.expire(lambda _: True, 9)) == ["a1", "b3"], "each has an equal part now"


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


class Clock:
    """Time that passes by work alone, and whatever a test adds: a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.worked_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.worked_s

    def work(self, time_s: float) -> None:
        self.now_s += time_s
        self.worked_s += time_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


async def _request(
    turns: LoopTurns, tenant: str, log: list[str], clock: Clock | None = None, work_s: float = 0.0
) -> None:
    await turns.begin(tenant)
    log.append(tenant)
    if clock is not None:
        clock.work(work_s)


async def test_an_idle_loop_lets_a_request_begin_at_once() -> None:
    turns, log = LoopTurns(), list[str]()
    request = _request(turns, "a", log)
    with pytest.raises(StopIteration):
        request.send(None)
    assert log == ["a"]
    await asyncio.sleep(0)  # the pass
    assert repr(turns) == "LoopTurns(Turns(waiting={}, seated={}))"


async def test_one_tenants_burst_leaves_a_turn_to_another_in_each_pass(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "many", log, clock, 0.005)) for _ in range(MOST + 100)]
    await asyncio.sleep(0)
    await _request(turns, "one", log)
    assert len(log) <= MOST + 1
    await asyncio.gather(*burst)
    assert log.count("many") == MOST + 100


async def test_long_passes_let_fewer_begin(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "a", log, clock, 0.015)) for _ in range(MOST * 2)]
    passes = []
    while len(log) < MOST * 2:
        before = len(log)
        await asyncio.sleep(0)
        passes.append(len(log) - before)
    await asyncio.gather(*burst)
    assert max(passes) == MOST - 1
    assert passes[-2] <= FEWEST


async def test_passes_in_which_others_have_the_cpu_are_not_long(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "a", log)) for _ in range(MOST * 3)]
    passes = []
    while len(log) < MOST * 3:
        before = len(log)
        await asyncio.sleep(0)
        clock.now_s += 2 * module.LONG_PASS_S
        passes.append(len(log) - before)
    await asyncio.gather(*burst)
    assert len(passes) <= 5


async def _burst(
    turns: LoopTurns, requests: int, clock: Clock, work_s: float, tenant: str = "a"
) -> tuple[int, list[LimitError]]:
    """How many of so many requests at once begin, and the errors of the others."""
    log = list[str]()
    ended = await asyncio.gather(
        *(_request(turns, tenant, log, clock, work_s) for _ in range(requests)), return_exceptions=True
    )
    return len(log), [error for error in ended if isinstance(error, LimitError)]


async def test_a_burst_waits_and_a_standing_queue_is_refused(clock: Clock) -> None:
    turns = LoopTurns()
    await turns.begin("a")
    await asyncio.sleep(0)
    clock.now_s += 1.1 * STANDING_S
    assert await _burst(turns, MOST * 3, clock, 0.02) == (MOST * 3, []), "nobody waited meanwhile"
    begun, refused = await _burst(LoopTurns(), MOST * 3, clock, 0.1)
    assert begun + len(refused) == MOST * 3
    assert refused
    assert {(error.status, error.code) for error in refused} == {(429, "gateway_busy")}


async def test_clients_that_come_again_at_once_leave_most_of_the_loop_to_calls(clock: Clock) -> None:
    turns, log, call_s = LoopTurns(), list[str](), 0.001
    until_s = clock.now_s + 4 * STANDING_S

    async def go_on(tenant: str) -> None:
        while clock.now_s < until_s:
            try:
                await _request(turns, tenant, log, clock, call_s)
            except LimitError:
                clock.work(call_s / 4)
            await asyncio.sleep(0)

    await asyncio.gather(*(go_on("many") for _ in range(1_000)), go_on("one"))
    assert len(log) * call_s > 0.8 * 4 * STANDING_S
    assert log.count("one") > 0.01 * len(log), "ten times the share of one client"


@pytest.mark.parametrize("other", ["a", "b"])
async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch, clock: Clock, other: str) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 30)
    turns, begun = LoopTurns(), MOST - 1 + 30
    await turns.begin(other)
    await asyncio.sleep(0)
    found, refused = await _burst(turns, 200, clock, 0.0)
    assert (found, len(refused)) == (begun, 200 - begun)


async def test_a_tenant_below_its_share_waits_beyond_the_bound(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 30)
    turns = LoopTurns()
    both = [_burst(turns, 200, clock, 0.0), _burst(turns, 10, clock, 0.0, "b")]
    (_, refused), other = await asyncio.gather(*both)
    assert refused
    assert other == (10, [])


async def test_a_request_whose_client_goes_gives_its_turn_up() -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "a", log)) for _ in range(MOST + 1)]
    await asyncio.sleep(0)
    burst[-1].cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    assert len(log) == MOST
    assert repr(turns).startswith("LoopTurns(Turns(waiting={}")
