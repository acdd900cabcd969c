"""What calls are promised when they are ready: their part of end-to-end times, against going through every call."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.guests.programs.core.held_call import HeldCall
from plait.gateway.guests.programs.core.session import Session, promised
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.programs.objectives import GROUP_STRETCH
from plait.policy.types import Call, Objective, Slo, TaskGroup
from tests.gateway.guests.programs.core.session_calls import Core, owner
from tests.invariants import check
from tests.policy.programs.jct_shares import jct_shares

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())

# Task groups


def answered(router: Router, output_tokens: int, group: TaskGroup | None = None) -> None:
    call = Call("c", "m", 65, 64, [1], group=group)
    booking = router.book(call, router.select(call, 0.0), 0.0)
    router.settle(booking, CallUsage(65, output_tokens, 0), 1.0)


def group_jct_s(router: Router, output_tokens: int | None) -> float:
    core = Core(router.predicted_s)
    maps = [core.add(f"M{n}", "task", [f"m{n}"], model="m", output_tokens=output_tokens) for n in range(2)]
    core.add("R", "m0 m1", objective=Objective.LATENCY)
    core.executor.variables.set_value(core.session(), "task", "", 0.0)
    (jct_s,) = {promise.slo.jct_s for call in maps if (promise := owner(call).ready) is not None and promise.slo}
    assert jct_s is not None
    return jct_s


def test_a_groups_jct_follows_from_what_calls_of_task_groups_generate() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    router.health.answered("a", {"m": None})
    answered(router, 8)
    assert group_jct_s(router, 400) == pytest.approx(GROUP_STRETCH * 400 * 0.011), "its limit, not 8"
    answered(router, 100, TaskGroup("g", 1))
    answered(router, 8)
    assert group_jct_s(router, 400) == pytest.approx(GROUP_STRETCH * 100 * 0.011)
    assert group_jct_s(router, 50) == pytest.approx(GROUP_STRETCH * 50 * 0.011)
    assert group_jct_s(router, None) == pytest.approx(GROUP_STRETCH * 100 * 0.011)


def test_a_call_knows_whether_its_slo_was_stated_or_deduced() -> None:
    core = Core()
    core.get("z", Slo(ttft_s=1.0, jct_s=60.0))
    core.add("Z", "x y", ["z"])
    part, own = core.add("X", "", ["x"]), core.add("Y", "", ["y"], slo=Slo(jct_s=9.0))
    plain = core.add("P")
    for call in (part, own):
        core.run(call, "text")
    told = [owner(call).ready for call in (part, own, plain, core.session().calls["Z"])]
    assert [ready.slo is not None and ready.slo.is_deduced for ready in told if ready is not None] == [
        True,
        False,
        False,
        False,
    ]


# End-to-end times


def shares_anew(session: Session, now_s: float) -> dict[str, float]:
    """The tightest share of each call, getter by getter, from the whole graph."""

    def left_s(call_id: str) -> float:
        call = session.calls[call_id]
        return max(0.0, call.predicted_s - (0.0 if call.ready_s is None else now_s - call.ready_s))

    tightest: dict[str, float] = {}
    for getter in (getter for waiting in session.getters.values() for getter in waiting):
        if isinstance(getter.mark, Slo) and getter.mark.jct_s is not None:
            elapsed_s = 0.0 if getter.since_s is None else now_s - getter.since_s
            shares = jct_shares(session.graph, getter.variable, getter.mark.jct_s - elapsed_s, left_s)
            for call_id, share_s in shares.items():
                tightest[call_id] = min(share_s, tightest.get(call_id, share_s))
    return tightest


def layers(core: Core, random: Random) -> list[HeldCall]:
    """Calls that take some of what the layer before makes; the first layer takes the client's `begin`."""
    calls: list[HeldCall] = []
    before = ["begin"]
    for layer in range(4):
        names = [f"v{layer}.{number}" for number in range(random.randrange(1, 4))]
        for name in names:
            inputs = " ".join(random.sample(before, random.randrange(1, len(before) + 1)))
            calls.append(core.add(f"of_{name}", inputs, [name], prompt_tokens=random.randrange(1000)))
        before = names
    return calls


@given(seed=st.integers(0, 2**32))
def test_at_every_event_a_ready_call_has_the_tightest_of_its_shares(seed: int) -> None:
    core, random, now_s = Core(), Random(seed), 0.0
    calls = layers(core, random)
    gets = [core.get(random.choice(calls).outputs[0].variable, Slo(jct_s=random.uniform(1, 60))) for _ in range(4)]
    core.executor.variables.set_value(core.session(), "begin", "", now_s)
    running: list[HeldCall] = []
    while any(not waiting.told for waiting in gets):
        now_s += random.uniform(0.0, 2.0)
        ready = [call for call in calls if owner(call).ready is not None]
        call = random.choice(ready)
        if call in running:
            core.executor.produce(call, "x" * random.randrange(400), now_s)
            calls.remove(call)
        else:
            core.executor.start(call, now_s)
            running.append(call)
        session = core.session()
        session.start_clocks()
        anew = shares_anew(session, now_s)
        ready = [call for call in session.calls.values() if owner(call).ready is not None]
        for call, start in promised(session, ready, now_s):
            share_s = anew.get(call.call_id)
            assert (start.slo and start.slo.jct_s if share_s else None) == (share_s or None)
        check(core.executor)
