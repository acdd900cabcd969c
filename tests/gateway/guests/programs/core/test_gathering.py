"""The gathering moment in literal times, in any order of arrival, and through the gateway."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plait.gateway.guests.programs.guest
from plait.gateway.guests.programs.core.held_call import HeldCall, ReadyCall
from plait.gateway.timed_events import Event
from plait.policy.programs.objectives import LATENCY_SLO
from plait.policy.types import Objective, Slo
from tests.gateway.guests.programs.chained_gateway import Served, served_calls, settle
from tests.gateway.guests.programs.core.session_calls import Core, owner
from tests.invariants import check

GATHER_S = 0.010


@pytest.fixture
def core() -> Core:
    return Core(gather_ms=10)


def ready(call: HeldCall) -> ReadyCall | None:
    return owner(call).ready


def check_core(core: Core) -> None:
    check(core.executor)
    core.elapse(100.0)
    gathering = core.executor._after._gathering
    assert (gathering._moments, gathering._homes) == ({}, {})


# The core.


def test_a_call_of_which_nothing_is_known_waits_for_a_moment(core: Core) -> None:
    call = core.add("A", outputs=["a"], now_s=1.0)
    core.elapse(1.009)
    assert ready(call) is None
    core.elapse(1.010)
    assert ready(call) == ReadyCall({}, 1.0), "it counts from its arrival"
    check_core(core)


def test_it_is_over_as_soon_as_somebody_says_what_the_call_is_for(core: Core) -> None:
    chain = [core.add("A", outputs=["a"], now_s=1.0), core.add("B", "a", ["b"], now_s=1.001)]
    assert ready(chain[0]) is None
    core.add("C", "b", now_s=1.002, objective=Objective.LATENCY)
    assert ready(chain[0]) == ReadyCall({}, 1.0, LATENCY_SLO, Objective.LATENCY)
    check_core(core)


@pytest.mark.parametrize("mark", [Objective.THROUGHPUT, Objective.LATENCY, Slo(jct_s=5.0)])
def test_a_get_says_so_too(core: Core, mark: Objective | Slo) -> None:
    call = core.add("A", outputs=["a"], prompt_tokens=1)
    core.get("a")
    assert ready(call) is None, "who waits for it has not said what for"
    core.get("a", mark, now_s=0.002)
    told = ready(call)
    assert told is not None
    assert told.objective is (Objective.THROUGHPUT if mark is Objective.THROUGHPUT else Objective.LATENCY)
    check_core(core)


def test_calls_that_gathered_run_as_one_task_group(core: Core) -> None:
    maps = [core.add(f"M{number}", outputs=[f"m{number}"], now_s=0.001 * number) for number in range(3)]
    core.add("R", "m0 m1 m2", now_s=0.004, objective=Objective.LATENCY)
    groups = [told.group for call in maps if (told := ready(call)) is not None]
    assert [group.calls for group in groups if group is not None] == [3, 3, 3]
    check_core(core)


def groups_of(calls: Iterable[HeldCall]) -> list[int]:
    """The size of each call's group; it has to run."""
    told = [ready(call) for call in calls]
    assert None not in told
    return [0 if one is None or one.group is None else one.group.calls for one in told]


@pytest.mark.parametrize("gap_s", [0.004, 0.006])
def test_calls_of_a_slow_client_run_as_one_task_group(core: Core, gap_s: float) -> None:
    maps = list[HeldCall]()
    for number in range(16):
        core.settle(gap_s * number)
        maps.append(core.add(f"M{number}", outputs=[f"m{number}"], now_s=gap_s * number))
    assert not any(map(ready, maps))
    core.settle(gap_s * 16)
    core.add("R", " ".join(f"m{number}" for number in range(16)), now_s=gap_s * 16, objective=Objective.LATENCY)
    assert groups_of(maps) == [16] * 16
    check_core(core)


@given(order=st.permutations(range(17)))
def test_they_do_so_in_any_order_of_arrival(order: list[int]) -> None:
    core, maps = Core(gather_ms=10), list[HeldCall]()
    for place, number in enumerate(order):
        core.settle(0.005 * place)
        if number == 16:
            inputs = " ".join(f"m{number}" for number in range(16))
            core.add("R", inputs, now_s=0.005 * place, objective=Objective.LATENCY)
        else:
            maps.append(core.add(f"M{number}", outputs=[f"m{number}"], now_s=0.005 * place))
        check(core.executor)
    assert groups_of(maps) == [16] * 16
    check_core(core)


def test_a_session_gathers_until_a_moment_after_its_latest_call(core: Core) -> None:
    calls = [core.add(f"A{number}", outputs=[f"a{number}"], now_s=0.009 * number) for number in range(4)]
    core.settle(0.036)
    assert not any(map(ready, calls))
    core.settle(0.037)
    assert all(map(ready, calls))
    check_core(core)


def test_it_does_not_gather_for_ever(core: Core) -> None:
    calls = list[HeldCall]()
    for number in range(40):
        core.settle(0.005 * number)
        calls.append(core.add(f"A{number}", outputs=[f"a{number}"], now_s=0.005 * number))
        first_ran = [ready(call) is not None for call in calls].count(True)
        assert first_ran == (0 if number < 20 else 20), "100 ms after the first"
    core.settle(1.0)
    assert all(map(ready, calls))
    check_core(core)


def test_a_call_whose_consumer_needs_what_only_the_client_can_give_waits_for_a_moment_only(core: Core) -> None:
    core.add("R", "a given", objective=Objective.LATENCY)
    call = core.add("A", outputs=["a"], now_s=1.0)
    assert ready(call) is None
    core.settle(1.0 + GATHER_S)
    assert ready(call) is not None
    again = core.add("B", "a2 given", objective=Objective.LATENCY, now_s=2.0)
    core.executor.variables.set_value(core.session(), "given", "it", 2.0)
    assert ready(core.add("A2", outputs=["a2"], now_s=2.001)) is not None, "nothing else is to come"
    assert ready(again) is None
    check_core(core)


@pytest.mark.parametrize(
    "annotated", [{"slo": Slo(ttft_s=1.0)}, {"objective": Objective.THROUGHPUT}, {"objective": Objective.LATENCY}]
)
def test_a_call_that_says_so_itself_does_not_wait(core: Core, annotated: dict[str, Any]) -> None:
    assert ready(core.add("A", outputs=["a"], **annotated)) is not None
    assert core._events == []


def test_nor_does_one_that_nobody_can_wait_for_or_that_has_waited_already(core: Core) -> None:
    core.executor.variables.set_value(core.session(), "x", "1", 0.0)
    assert ready(core.add("A", "x")) is not None
    held = core.add("B", "y", ["b"])
    core.executor.variables.set_value(core.session(), "y", "1", 1.0)
    assert ready(held) is not None
    core.get("c", Objective.LATENCY)
    assert ready(core.add("C", outputs=["c"])) is not None
    assert core._events == []


def test_a_call_whose_inputs_are_there_waits_as_one_without(core: Core) -> None:
    core.executor.variables.set_value(core.session(), "x", "1", 0.0)
    call = core.add("A", "x", ["a"])
    assert ready(call) is None
    core.elapse(GATHER_S)
    assert ready(call) == ReadyCall({"x": "1"}, 0.0)


def test_a_call_that_ends_meanwhile_is_never_ready(core: Core) -> None:
    left, failed, ended = (core.add(name, outputs=[name.lower()]) for name in "ABC")
    core.executor.leave([left], 0.001)
    core.executor.fail(failed, "no", 0.001)
    core.executor.endings.end(core.session(), "was deleted", 0.0)
    core.elapse(GATHER_S)
    assert [ready(call) for call in (left, failed, ended)] == [None] * 3
    check_core(core)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """The inputs of each call, of the calls before it."""
    size = draw(st.integers(1, 7))
    return [tuple(draw(st.sets(st.integers(0, number - 1), max_size=3))) if number else () for number in range(size)]


@given(program=programs(), random=st.randoms(use_true_random=False))
def test_fired_in_any_order_every_call_knows_what_it_is_for(program: list[tuple[int, ...]], random: Any) -> None:
    core, last = Core(gather_ms=10), len(program) - 1
    calls: dict[int, HeldCall] = {}
    for place, number in enumerate(random.sample(range(len(program)), len(program))):
        inputs = " ".join(f"v{before}" for before in program[number])
        objective = Objective.LATENCY if number == last else None
        calls[number] = core.add(
            f"C{number}", inputs, [f"v{number}"], now_s=0.001 * place, objective=objective, prompt_tokens=1
        )
        check(core.executor)
    upstream = {last}
    for number in range(last, -1, -1):
        upstream |= set(program[number]) if number in upstream else set()
    for number, inputs_of in enumerate(program):
        told = ready(calls[number])
        if inputs_of:
            assert told is None
        elif number in upstream:
            assert told is not None
            assert told.objective is Objective.LATENCY
        else:
            assert told is None
    core.elapse(1.0)
    assert [ready(calls[number]) is not None for number in calls] == [not program[number] for number in calls]


# Through the gateway.


async def chain_in_the_wrong_order(served: Served) -> None:
    """The head first, which nobody is known to wait for, and last the call that says what all of it is for."""
    await served.chat("Write", output="code")
    await served.chat("Review {{code}}", inputs="code", output="review")
    await served.chat("Revise {{code}} by {{review}}", inputs="code, review", objective="latency")


async def test_a_chain_fired_in_the_wrong_order_gets_its_objective_down_to_its_first_call() -> None:
    async with served_calls(gather_ms=60_000) as served:
        await chain_in_the_wrong_order(served)
        call = served.engine.running["Write"][0].call
        assert (call.objective, call.slo) == (Objective.LATENCY, LATENCY_SLO)


async def test_without_the_moment_its_first_call_is_best_effort() -> None:
    async with served_calls(gather_ms=0) as served:
        await chain_in_the_wrong_order(served)
        call = served.engine.running["Write"][0].call
        assert (call.objective, call.slo) == (None, Slo())


async def test_a_call_that_nobody_joins_runs_when_the_moment_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    due: list[tuple[float, Event]] = []
    monkeypatch.setattr(
        plait.gateway.guests.programs.guest, "at_loop_time", lambda when_s, event: due.append((when_s, event))
    )
    async with served_calls(gather_ms=10) as served:
        await served.chat("Write", output="code")
        assert served.engine.running == {}
        ((when_s, event),) = due
        event(when_s)
        await settle()
        asked = served.engine.running["Write"][0]
        assert asked.call.objective is None
        assert asked.arrived_s == pytest.approx(when_s - 0.010), "it counts from its arrival"


# An objective of the session.


def test_siblings_of_a_session_with_an_objective_gather_and_run_as_one_group(core: Core) -> None:
    core.executor.prefer(core.session(), Objective.LATENCY, 0.0)
    maps = [core.add(f"M{number}", outputs=[f"m{number}"]) for number in range(16)]
    assert not any(map(ready, maps)), "nobody has said yet what they are for"
    core.elapse(GATHER_S)
    told = [found for call in maps if (found := ready(call)) is not None]
    assert {one.objective for one in told} == {Objective.LATENCY}
    assert [one.group.calls for one in told if one.group is not None] == [16] * 16
    check_core(core)


def test_a_consumer_says_what_the_siblings_are_for(core: Core) -> None:
    core.executor.prefer(core.session(), Objective.LATENCY, 0.0)
    maps = [core.add(f"M{number}", outputs=[f"m{number}"]) for number in range(16)]
    core.add("R", " ".join(f"m{number}" for number in range(16)), ["r"], now_s=0.001)
    told = [found for call in maps if (found := ready(call)) is not None]
    assert [one.group.calls for one in told if one.group is not None] == [16] * 16
    assert {one.group.group_id for one in told if one.group is not None} == {"t/s//1"}
    check_core(core)


async def test_sixteen_maps_and_a_reduce_by_headers_are_grouped_first_stage_included() -> None:
    async with served_calls(gather_ms=1_000) as served:
        parts = [f"p{number}" for number in range(16)]
        wanted = {"session-objective": "latency"}
        maps = [await served.chat(f"Map {part}", output=part, plait=wanted) for part in parts]
        assert served.engine.running == {}
        reduce = await served.chat(" ".join(f"{{{{{part}}}}}" for part in parts), inputs=",".join(parts))
        groups = {asked.call.group for asked, *_ in served.engine.running.values()}
        assert [group.calls for group in groups if group is not None] == [16]
        for part in parts:
            await served.engine.answer(f"Map {part}", part)
        await served.engine.answer(" ".join(parts), "all")
        assert ([one.text for one in maps], reduce.text) == (parts, "all")


async def test_a_plain_call_of_such_a_session_has_its_objective() -> None:
    async with served_calls() as served:
        await served.send("/v1/sessions", {"session_id": "s", "objective": "latency"})
        call = await served.chat("Say it")
        (asked,) = [asked for asked, *_ in served.engine.running.values()]
        assert (asked.call.objective, asked.call.slo) == (Objective.LATENCY, LATENCY_SLO)
        await served.engine.answer("Say it", "it")
        assert call.text == "it"
