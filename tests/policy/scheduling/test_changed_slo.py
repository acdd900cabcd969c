"""A call's SLO may change while the call waits or runs. The plan is as if the call had had it from the start."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import LocalScheduler, MeasuringScheduler
from plait.policy.types import Objective, Slo
from tests.policy.scheduling.fake_engine import COSTS, FakeEngine, check_plan, engines, slos

Objectives = list[tuple[Slo | None, Objective | None]]

objectives = st.lists(st.tuples(slos, st.none() | st.sampled_from(Objective)), min_size=12, max_size=12)


def give(engine: FakeEngine, chosen: Objectives) -> None:
    for call, (slo, objective) in zip([*engine.running, *engine.waiting], chosen, strict=False):
        call.slo, call.objective = slo, objective


def scheduler(name: str) -> LocalScheduler:
    made = SCHEDULERS[name]()
    if isinstance(made, MeasuringScheduler):
        made.expect(COSTS)
    return made


@given(
    engine=engines(),
    before=objectives,
    after=objectives,
    name=st.sampled_from(sorted(SCHEDULERS)),
    pause_s=st.floats(0.001, 3.0),
)
def test_a_changed_slo_counts_like_one_from_the_start(
    engine: FakeEngine, before: Objectives, after: Objectives, name: str, pause_s: float
) -> None:
    late, early = scheduler(name), scheduler(name)
    now_s = 3.0
    for one, chosen in ((late, before), (early, after)):
        give(engine, chosen)
        check_plan(engine, engine.plan(one, now_s))
        # A plan that leaves out decodes is followed by one that does not. That is no memory of objectives.
        assume(getattr(one, "_paused_s", None) is None)
    give(engine, after)
    plan = engine.plan(late, now_s + pause_s)
    check_plan(engine, plan)
    assert plan == engine.plan(early, now_s + pause_s)
