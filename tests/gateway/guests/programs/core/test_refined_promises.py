"""A later get or call changes what running calls are promised: in literal times, and through the gateway."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.guests.programs.core.held_call import HeldCall, Promise
from plait.gateway.guests.programs.core.session import promised
from plait.gateway.guests.programs.program import Program, entry
from plait.policy.programs.objectives import GROUP_STRETCH, LATENCY_SLO, NOTHING, Deduction
from plait.policy.types import Objective, Slo
from tests.gateway.guests.programs.chained_gateway import served_calls
from tests.gateway.guests.programs.core.session_calls import Core, Owner, Waiting, owner
from tests.invariants import check
from tests.pieces import at_once


def slo_from(promise: Promise, zero_s: float) -> Slo | None:
    return None if promise.slo is None else promise.slo.from_zero(promise.since_s - zero_s)


@pytest.fixture
def core() -> Core:
    return Core()


def started(core: Core, call_id: str, output: str, now_s: float = 0.0, **more: Any) -> HeldCall:
    """A call without inputs that runs at once."""
    call = core.add(call_id, outputs=[output], now_s=now_s, **more)
    core.executor.start(call, now_s)
    return call


# The core.


def test_a_get_of_what_runs_says_what_it_is_for(core: Core) -> None:
    call = started(core, "A", "a")
    core.get("a", Objective.LATENCY, now_s=30.0)
    (promise,) = owner(call).refined
    assert (promise.slo, promise.objective, promise.group) == (LATENCY_SLO, Objective.LATENCY, None)
    slo = slo_from(promise, 0.0)
    assert slo == Slo(ttft_s=31.0, tpot_s=0.040, is_deduced=True), "nothing can be promised for the time before"


def test_it_is_told_once(core: Core) -> None:
    call = started(core, "A", "a")
    for now_s in (1.0, 2.0):
        core.get("a", Objective.LATENCY, now_s=now_s)
    core.get("a", now_s=3.0)
    assert len(owner(call).refined) == 1


def test_a_consumer_says_so_too(core: Core) -> None:
    maps = [started(core, f"M{number}", f"m{number}", prompt_tokens=100 * (1 + number)) for number in range(3)]
    core.add("R", "m0 m1 m2", now_s=4.0, objective=Objective.LATENCY)
    promises = [promise for call in maps for promise in owner(call).refined]
    assert {promise.group.group_id for promise in promises if promise.group} == {"t/s/R/1"}
    assert {slo_from(promise, 0.0) for promise in promises} == {Slo(jct_s=4.0 + GROUP_STRETCH * 3.0, is_deduced=True)}
    assert len(promises) == 3


def test_the_last_call_of_a_group_keeps_what_the_group_was_promised(core: Core) -> None:
    first, last = (started(core, name, name.lower(), prompt_tokens=100) for name in "AB")
    core.add("R", "a b", objective=Objective.LATENCY)
    core.executor.produce(first, "text", 7.0)
    assert len(owner(last).refined) == 1, "nobody has said more of it"
    core.get("b", Slo(tpot_s=0.03), now_s=8.0)
    before, after = owner(last).refined
    assert (after.slo, after.since_s) == (Slo(tpot_s=0.03), 8.0)
    assert after.group == before.group, "in the books it stays one of the group"


def test_what_a_call_states_itself_stays(core: Core) -> None:
    own = Slo(ttft_s=2.0)
    stated = started(core, "A", "a", slo=own)
    batch = started(core, "B", "b", objective=Objective.THROUGHPUT)
    for name in "ab":
        core.get(name, Objective.LATENCY, now_s=5.0)
    (promise,) = owner(stated).refined
    assert (promise.objective, slo_from(promise, 0.0)) == (Objective.LATENCY, own)
    assert owner(batch).refined == []


def test_the_figures_of_a_get_reach_running_calls(core: Core) -> None:
    call = started(core, "A", "a", prompt_tokens=300)
    core.add("B", "a", ["b"], prompt_tokens=100)
    core.get("a", Objective.LATENCY, now_s=1.0)
    core.get("a", Slo(ttft_s=0.5), now_s=2.0)
    core.get("b", Slo(jct_s=10.0), now_s=2.0)
    *_, figures, with_share = owner(call).refined
    assert slo_from(figures, 0.0) == Slo(ttft_s=2.5), "the deduction is the same, the figures are not"
    assert with_share.slo is not None
    assert with_share.slo.ttft_s == 0.5
    assert with_share.slo.jct_s == pytest.approx(4.0), "8 s are left, for 1 s here and 1 s there"
    assert with_share.since_s == 2.0


def test_calls_that_ended_or_never_ran_are_told_nothing(core: Core) -> None:
    held, ended = core.add("A", "x", ["a"]), started(core, "B", "b")
    core.executor.fail(ended, "no", 1.0)
    for name in "ab":
        core.get(name, Objective.LATENCY, now_s=2.0)
    assert (owner(held).refined, owner(ended).refined) == ([], [])


def test_a_client_that_goes_takes_nothing_back(core: Core) -> None:
    call = started(core, "A", "a")
    waiting = core.get("a", Objective.LATENCY, now_s=1.0)
    core.executor.variables.release(core.session(), waiting.getter, 2.0)
    assert [promise.objective for promise in owner(call).refined] == [Objective.LATENCY]


def test_a_program_refines_running_calls_as_a_whole(core: Core) -> None:
    maps = [started(core, f"M{number}", f"m{number}") for number in range(2)]
    reduce, last = (
        HeldCall(name, tuple(inputs.split()), (), Owner(), objective=objective)
        for name, inputs, objective in (("R", "m0 m1", None), ("S", "m0 m1", Objective.LATENCY))
    )
    program = Program({}, {"R": reduce, "S": last}, [Waiting("m0", Objective.THROUGHPUT).getter])
    at_once(entry(core.executor, core.session(), program, 3.0))
    assert [len(owner(call).refined) for call in maps] == [1, 1]
    assert {promise.objective for call in maps for promise in owner(call).refined} == {Objective.LATENCY}


@given(seed=st.integers(0, 2**32))
def test_what_is_deduced_anew_by_a_get_or_a_call_is_promised(seed: int) -> None:
    core, random = Core(), Random(seed)
    running: list[HeldCall] = []
    for number in range(12):
        now_s, event = float(number), random.randrange(4)
        before = [(call, call.promise, deduced(core, call)) for call in running]
        if event == 3 and running:
            call = running.pop(random.randrange(len(running)))
            core.executor.produce(call, "text", now_s)
        elif event == 2:
            core.get(f"v{random.randrange(number + 1)}", random.choice([None, *Objective]), now_s=now_s)
        else:
            inputs = random.sample([f"v{before}" for before in range(number)], random.randrange(min(3, number + 1)))
            annotated = random.choice([None, None, None, *Objective])
            core.add(f"C{number}", " ".join(inputs), [f"v{number}"], now_s, objective=annotated, prompt_tokens=number)
        for call, promise, deduction in before:
            if call not in running:
                continue
            if event == 3 or deduced(core, call) == deduction:
                assert call.promise == promise
            else:
                ((_, ready),) = promised(core.session(), [call], now_s)
                assert call.promise is not None
                assert (call.promise.objective, call.promise.slo) == (ready.objective, ready.slo)
                assert ready.group in {None, call.promise.group}
                assert owner(call).refined[-1:] in ([], [call.promise])
        for call in core.session().calls.values():
            if owner(call).ready is not None and call not in running:
                core.executor.start(call, now_s)
                running.append(call)
        check(core.executor)


def deduced(core: Core, call: HeldCall) -> Deduction:
    """What is deduced of a call now; nothing of one that has ended."""
    session = core.session()
    return session.deductions.of(call.call_id) if call.call_id in session.calls else NOTHING


# Through the gateway.


async def test_the_engine_of_a_running_call_is_told_of_a_later_get() -> None:
    async with served_calls() as served:
        call = await served.chat("Write", output="code")
        sent = served.engine.running["Write"][0]
        assert (sent.call.objective, sent.slot.handle is None) == (None, False)
        get = await served.get("code", criteria="latency")
        ((handle, objectives),) = served.engine.refined
        assert handle == sent.slot.handle
        assert objectives.objective is Objective.LATENCY
        assert objectives.slo is not None
        assert objectives.slo.ttft_s is not None
        assert objectives.slo.ttft_s > 1.0, "from its arrival: it has run for a while"
        assert objectives.slo.tpot_s == 0.040
        await served.engine.answer("Write", "x = 1")
        assert (call.text, get.json["value"]) == ("x = 1", "x = 1")


async def test_a_call_that_starts_again_has_its_newest_objectives() -> None:
    async with served_calls(max_attempts=2) as served:
        await served.submit("Do {{it}}", "it", chat=False)
        await served.get("it", criteria="throughput")
        await served.engine.break_off("Do", "half")
        assert served.engine.running["Do"][0].call.objective is Objective.THROUGHPUT
        await served.engine.answer("Do", "it")


async def test_the_next_step_of_a_submitted_call_has_its_newest_objectives() -> None:
    async with served_calls() as served:
        await served.submit("Do {{it}} Test: {{test}}", "it", "test", chat=False)
        get = await served.get("test", criteria={"slo_tpot_ms": 30, "slo_jct_ms": 60_000})
        ((handle, objectives),) = served.engine.refined
        assert objectives.slo is not None
        assert objectives.slo.jct_s == pytest.approx(30.0, abs=2.0), "half for each step"
        await served.engine.answer("Do", "it")
        second = served.engine.running["Do it Test:"][0]
        assert second.slot.handle != handle
        assert second.call.slo is not None
        assert second.call.slo.tpot_s == 0.030
        assert second.call.slo.jct_s == pytest.approx(60.0, abs=4.0)
        await served.engine.answer("Do it Test:", "ok")
        assert get.json["value"] == "ok"
