"""Turns against oracles, and the account of a busy event loop's time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import LimitError
from plait.gateway.intake import turns as module
from plait.gateway.intake.turns import LEAST_S, LONG_BYTES, LONG_PASS_S, SLICE_S, STANDING_S, LoopTurns, Pieces, Turns


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


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=60))
def test_who_always_waits_uses_as_much_as_another_within_a_job(costs: list[tuple[str, int]]) -> None:
    """What a tenant's next jobs cost is known only afterwards. A tenant that came later has no claim on what was."""
    turns: Turns[int] = Turns(1)
    used = dict.fromkeys("abc", 0)
    queued = {tenant: [cost for other, cost in costs if other == tenant] for tenant in "abc"}
    for tenant, own in queued.items():
        for cost in own:
            turns.add(tenant, cost)
    while (taken := turns.take()) is not None:
        tenant, cost = taken
        assert all(used[tenant] <= used[other] for other in "abc" if queued[other]), "the least that waits is next"
        queued[tenant].remove(cost)
        used[tenant] += cost
        turns.charge(tenant, cost)
        turns.done(tenant)


def test_who_was_away_begins_as_the_last_one_that_had_a_turn() -> None:
    turns: Turns[str] = Turns(1)
    order = []

    def take() -> None:
        taken = turns.take()
        assert taken is not None
        order.append(taken[1])
        turns.charge(taken[0], 5.0)
        turns.done(taken[0])

    for number in range(6):
        turns.add("a", f"a{number}")
    take()
    take()
    take()  # a has used 15
    for number in range(3):
        turns.add("b", f"b{number}")
    for _ in range(6):
        take()
    assert order == ["a0", "a1", "a2", "b0", "a3", "b1", "a4", "b2", "a5"]


class Clock:
    """Time that passes by work alone, and whatever a test adds: a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.worked_s = 0.0

    def thread_time(self) -> float:
        return self.worked_s

    def work(self, time_s: float) -> None:
        self.now_s += time_s
        self.worked_s += time_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "LONG_PASS_S", LONG_PASS_S)
    monkeypatch.setattr(module, "SLICE_S", SLICE_S)
    monkeypatch.setattr(module, "LONG_BYTES", LONG_BYTES)
    monkeypatch.setattr(module, "loop_time_s", lambda: clock.now_s)

    async def sleep(delay_s: float) -> None:
        until_s = clock.now_s + delay_s
        while clock.now_s < until_s - 1e-9:
            await real_sleep(0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda delay_s: sleep(delay_s) if delay_s > 0 else real_sleep(0))
    return clock


def _use_up(turns: LoopTurns, tenant: str) -> None:
    """The tenant uses this pass."""
    assert turns.may_begin(tenant)
    turns.charge(tenant, LONG_PASS_S)


async def _request(turns: LoopTurns, tenant: str, log: list[str], clock: Clock, work_s: float = 0.0) -> None:
    async def work() -> None:
        await turns.take(tenant)
        log.append(tenant)
        clock.work(work_s)

    await turns.charged(tenant, work())


def _task(turns: LoopTurns, tenant: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    async def charged() -> Any:
        return await turns.charged(tenant, work)

    return asyncio.create_task(charged())


async def _passes(turns: LoopTurns, log: list[str], until: int) -> list[int]:
    """How many requests began in each iteration of the loop, until so many have."""
    passes = []
    while len(log) < until:
        before = len(log)
        await asyncio.sleep(0)
        passes.append(len(log) - before)
    return passes


async def test_an_idle_loop_lets_a_request_begin_at_once(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()
    await _request(turns, "a", log, clock)
    assert log == ["a"]
    assert repr(turns) == "LoopTurns(Turns(waiting={}, seated={}))"


async def test_one_tenants_burst_leaves_a_turn_to_another(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()
    burst = [asyncio.create_task(_request(turns, "many", log, clock, 0.005)) for _ in range(200)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await _request(turns, "one", log, clock)
    assert len(log) <= 10
    await asyncio.gather(*burst)
    assert log.count("many") == 200


async def test_calls_that_wait_without_a_task_begin_as_far_as_the_budget_goes(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()

    def begin() -> None:
        log.append("a")
        clock.work(LONG_PASS_S / 5)

    _use_up(turns, "a")
    assert not turns.may_begin("a")
    for _ in range(12):
        turns.wait("a", begin, None)
    assert await _passes(turns, log, 12) == [5, 5, 2]
    await asyncio.sleep(0)
    assert turns.may_begin("a")


async def test_what_relaying_takes_of_a_pass_is_left_out_of_the_budget(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()

    def begin() -> None:
        log.append("a")
        clock.work(LEAST_S)

    _use_up(turns, "a")
    for _ in range(300):
        turns.wait("a", begin, None)
    passes = []
    while len(log) < 300:
        before = len(log)
        await asyncio.sleep(0)
        clock.work(LONG_PASS_S)
        passes.append(len(log) - before)
    assert passes[0] == 5
    assert max(passes[100:]) <= 2


async def test_a_call_that_gives_up_is_not_begun(clock: Clock) -> None:
    turns, log = LoopTurns(), list[int]()
    _use_up(turns, "a")
    waiting = [turns.wait("a", partial(log.append, number), None) for number in range(3)]
    turns.leave("a", waiting[1])
    await asyncio.sleep(0)
    assert log == [0, 2]


async def test_a_defect_as_a_call_begins_takes_no_turn_from_the_next(clock: Clock) -> None:
    turns, log, told = LoopTurns(), list[str](), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))

    def defective() -> None:
        raise RuntimeError("a defect")

    _use_up(turns, "a")
    turns.wait("a", defective, None)
    turns.wait("a", lambda: log.append("a"), None)
    await _passes(turns, log, 1)
    assert [str(error) for error in told] == ["a defect"]


async def test_long_work_rests_for_as_long_as_it_took(clock: Clock) -> None:
    """Whatever it does at once, a tenant's long work leaves half of the loop to others, and is done in the end."""
    turns, log, at_s = LoopTurns(), list[str](), list[float]()

    async def long() -> None:
        await turns.go_on("many", LONG_BYTES + 1)
        at_s.append(clock.now_s)
        clock.work(0.1)
        log.append("many")

    tasks = [_task(turns, "many", long()) for _ in range(5)]
    while len(log) < 6:
        await asyncio.sleep(0)
        clock.now_s += 0.001
        if len(log) == 3:
            await _request(turns, "one", log, clock)
            assert log[-1] == "one", "it waits for nobody"
    await asyncio.gather(*tasks)
    gaps = [after - before for before, after in pairwise(at_s)]
    assert min(gaps) >= 0.199


async def test_requests_of_few_bytes_do_not_rest(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()
    await _request(turns, "a", log, clock, 1.0)
    for _ in range(20):
        await _request(turns, "a", log, clock, 0.001)
    assert clock.now_s < 1.1


async def test_work_in_pieces_yields_after_each_slice_and_is_charged(clock: Clock) -> None:
    turns, iterations = LoopTurns(), list[int]()

    def work() -> Pieces[str]:
        for _ in range(100):
            clock.work(0.001)
            yield
        return "done"

    async def counts() -> None:
        while True:
            iterations.append(1)
            await asyncio.sleep(0)

    counting = asyncio.create_task(counts())
    assert await turns.charged("a", turns.run("a", work())) == "done"
    counting.cancel()
    assert 100 * 0.001 / len(iterations) <= 0.007


@pytest.mark.parametrize("cancelled", [slice(0, 60), slice(40, 100), slice(3, 97)])
async def test_those_that_wait_go_on_when_others_are_cancelled(clock: Clock, cancelled: slice) -> None:
    turns, log = LoopTurns(), list[str]()
    tasks = [asyncio.create_task(_request(turns, "a", log, clock, 0.009)) for _ in range(100)]
    for _ in range(5):  # some were let go on and have not run yet
        await asyncio.sleep(0)
    for task in tasks[cancelled]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ended = {number for number, task in enumerate(tasks) if not task.cancelled()}
    assert ended >= set(range(100)) - set(range(100)[cancelled])
    assert repr(turns) == "LoopTurns(Turns(waiting={}, seated={}))"


async def test_what_the_work_raises_is_raised_and_work_that_is_given_up_is_closed(clock: Clock) -> None:
    turns, closed = LoopTurns(), []

    def fails() -> Pieces[str]:
        yield
        raise ValueError("no")

    def long() -> Pieces[str]:
        try:
            for _ in range(1_000):
                clock.work(0.006)
                yield
        finally:
            closed.append("long")
        return ""

    with pytest.raises(ValueError, match="no"):
        await turns.charged("a", turns.run("a", fails()))
    task = _task(turns, "a", turns.run("a", long()))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == ["long"]


async def test_a_charged_task_is_cancelled_as_any_other(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    task = _task(turns, "a", work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["cancelled"]


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
    await turns.take("a")
    await asyncio.sleep(0)
    clock.now_s += 1.1 * STANDING_S
    assert await _burst(turns, 192, clock, 0.009) == (192, []), "nobody waited meanwhile"
    begun, refused = await _burst(LoopTurns(), 1_000, clock, 0.009)
    assert begun + len(refused) == 1_000
    assert refused
    assert {(error.status, error.code) for error in refused} == {(429, "gateway_busy")}


async def test_nothing_is_refused_for_a_standstill_of_the_gateway(clock: Clock) -> None:
    turns = LoopTurns()
    log = list[str]()
    requests = [asyncio.create_task(_request(turns, "a", log, clock, 0.009)) for _ in range(100)]
    while len(log) < 10:  # noqa: ASYNC110 - requests set no event
        await asyncio.sleep(0)
    clock.now_s += 2 * STANDING_S
    await asyncio.gather(*requests)
    assert len(log) == 100


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
    turns = LoopTurns()
    asyncio.get_running_loop().call_soon(_use_up, turns, other)
    begun, refused = await _burst(turns, 200, clock, 0.0)
    assert (begun, len(refused)) == (30, 170)


async def test_a_tenant_below_its_share_waits_beyond_the_bound(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 30)
    turns = LoopTurns()
    asyncio.get_running_loop().call_soon(_use_up, turns, "c")
    requests = [_request(turns, tenant, [], clock) for tenant in "a" * 200 + "b" * 10]
    ended = await asyncio.gather(*requests, return_exceptions=True)
    assert any(ended[:200])
    assert ended[200:] == [None] * 10


async def test_a_request_whose_client_goes_gives_its_turn_up(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()
    asyncio.get_running_loop().call_soon(_use_up, turns, "a")
    burst = [asyncio.create_task(_request(turns, "a", log, clock)) for _ in range(5)]
    await asyncio.sleep(0)
    burst[-1].cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    assert len(log) == 4
    assert repr(turns) == "LoopTurns(Turns(waiting={}, seated={}))"


async def test_tasks_leave_relaying_its_part_of_the_pass(clock: Clock) -> None:
    """What they will cost is an estimate at first; what they have cost is no work of others."""
    turns, log = LoopTurns(), list[str]()
    _use_up(turns, "b")
    burst = [asyncio.create_task(_request(turns, "a", log, clock, 0.001)) for _ in range(400)]
    begun = []
    while len(log) < 400:
        before = len(log)
        await asyncio.sleep(0)
        clock.work(0.8 * LONG_PASS_S)
        begun.append(len(log) - before)
    await asyncio.gather(*burst)
    assert max(begun[100:]) <= 3, "a fifth of the pass"


async def test_one_refusal_that_fails_keeps_no_other_from_its_answer(clock: Clock) -> None:
    turns, log = LoopTurns(), list[str]()

    def defective(_error: LimitError) -> None:
        raise RuntimeError("a defect")

    _use_up(turns, "b")
    turns.wait("a", partial(log.append, "begun"), defective)
    turns.wait("a", partial(log.append, "begun"), lambda _error: log.append("refused"))
    turns.wait("a", partial(log.append, "begun"), None)
    clock.now_s += 2 * STANDING_S
    turns._pass_s = clock.now_s
    turns._begun = 10
    for _ in range(3):
        await asyncio.sleep(0)
    assert log == ["refused", "begun"]
