"""The `slo` scheduler in part: what each part does by example, and what holds for every composition."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedulers.ablations import (
    ABLATIONS,
    BY_ARRIVAL,
    PREEMPT_ANY,
    UNTIL_COMPLETED,
    VARIANTS,
    KeptPlace,
    any_number,
    engine_budget,
    make_no_room,
    never_pause,
    no_arrivals,
    select_by_order,
    sort_by_arrival_keeping_place,
)
from benchmarks.schedulers.published import ChunkedObjectives, pivot_budget
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.moment import SloSettings
from plait.policy.scheduling.plan import Plan
from plait.policy.scheduling.slo_scheduler import PHASES, Phases, SloScheduler
from plait.policy.types import Slo
from tests.examples import examples
from tests.policy.scheduling.fake_engine import COSTS, FakeEngine, check_plan, decode, engines, names, prompt
from tests.policy.scheduling.real_engine import CallSpec, call_specs, check_every_call_finishes

Ablation = tuple[SloSettings, Phases]

PLAIN = SloSettings()
LONG_20 = SloSettings(long_tokens=20)
EVERY: list[Ablation] = [
    (PLAIN, PHASES),
    (PLAIN, replace(PHASES, budget=pivot_budget, objectives=ChunkedObjectives)),
    (PLAIN, replace(PHASES, budget=engine_budget, select=select_by_order)),
    (
        PLAIN,
        replace(BY_ARRIVAL, long_slots=any_number, objectives=KeptPlace, sort_waiting=sort_by_arrival_keeping_place),
    ),
    (
        SloSettings(long_tokens=20, default_slo=Slo(tpot_s=0.1875)),
        replace(UNTIL_COMPLETED, make_room=PREEMPT_ANY.make_room),
    ),
    (SloSettings(long_tokens=20, best_effort_share=0.0), replace(PHASES, make_room=make_no_room)),
    (SloSettings(max_preemptions=1), replace(PHASES, may_pause=never_pause, arrivals_slack_s=no_arrivals)),
    *((LONG_20, phases) for phases in (*ABLATIONS.values(), *VARIANTS.values())),
]


def scheduler(ablation: Ablation, costs: CostModel | None = COSTS) -> SloScheduler:
    composed = SloScheduler(*ablation)
    if costs is not None:
        composed.expect(costs)
    return composed


def planned(engine: FakeEngine, phases: Phases, now_s: float = 0.0) -> Plan:
    return engine.plan(scheduler((PLAIN, phases)), now_s)


def test_budgets_that_are_not_solved() -> None:
    call = decode("decode", output=1, slo=Slo(tpot_s=0.05001))
    engine = FakeEngine(running=[call], waiting=[prompt("prompt", 900, 5.0)])
    # Equation 6: S_b = 900 x 0.05 / 0.1 = 450.
    assert names(planned(engine, VARIANTS["slo_equation_6"])) == [("decode", 1), ("prompt", 449)]
    plan = planned(engine, replace(PHASES, budget=engine_budget))
    assert (names(plan), plan.budget_tokens) == ([("decode", 1), ("prompt", 900)], 1000)


def test_selection_in_order_keeps_ascending_remaining_time() -> None:
    engine = FakeEngine(max_batch_tokens=200, waiting=[prompt("loose", 100, 9.0), prompt("tight", 100, 1.0)])
    assert names(planned(engine, ABLATIONS["slo_without_batch"])) == [("tight", 100), ("loose", 100)]
    engine = FakeEngine(max_batch_tokens=100, waiting=[prompt("loose", 100, 2.5), prompt("tight", 60, 2.0)])
    assert names(planned(engine, PHASES)) == [("loose", 100)], "within gamma the better fit goes first"
    assert names(planned(engine, ABLATIONS["slo_without_batch"])) == [("tight", 60), ("loose", 40)]


def test_the_order_of_arrival_knows_no_urgency() -> None:
    engine = FakeEngine(max_batch_tokens=100, waiting=[prompt("first", 100, 9.0), prompt("urgent", 60, 0.1)])
    assert names(planned(engine, ABLATIONS["slo_without_order"])) == [("first", 100)]


def test_a_call_that_cannot_meet_its_ttft_any_more_keeps_its_place() -> None:
    engine = FakeEngine(max_batch_tokens=100, waiting=[prompt("lost", 90, 0.5), prompt("due", 100, 2.0)])
    assert names(planned(engine, VARIANTS["slo_lost_keep"], 0.6)) == [("lost", 90), ("due", 10)]


LONG_PROMPTS = {"until_prefilled": PHASES, "until_completed": UNTIL_COMPLETED, "any": VARIANTS["slo_any_long"]}


@pytest.mark.parametrize(
    ("mode", "budget", "started"),
    [
        ("until_prefilled", 5020, {"a", "short"}),
        ("until_prefilled", 8000, {"a", "b", "short"}),  # the first is through, and nobody else wants what is left
        ("until_completed", 8000, {"a", "short"}),
        ("any", 8000, {"a", "b", "short"}),
    ],
)
def test_one_long_prompt_at_a_time(mode: str, budget: int, started: set[str]) -> None:
    waiting = [prompt(name, 5000, ttft_s) for name, ttft_s in (("a", 9.0), ("b", 9.1))] + [prompt("short", 50, 9.2)]
    engine = FakeEngine(max_batch_tokens=budget, waiting=waiting)
    plan = planned(engine, LONG_PROMPTS[mode])
    assert {name for name, _ in names(plan)} == started


@pytest.mark.parametrize(("mode", "second"), [("until_prefilled", True), ("until_completed", False), ("any", True)])
def test_the_next_long_prompt_starts_when_the_first_is_through(mode: str, second: bool) -> None:
    planner = scheduler((PLAIN, LONG_PROMPTS[mode]))
    first, other = prompt("first", 5000, 50.0), prompt("second", 5000, 60.0)
    engine = FakeEngine(max_batch_tokens=4000, waiting=[first, other])
    assert [name for name, _ in names(engine.plan(planner))] == ["first"]
    engine.waiting.remove(first)
    engine.running.append(first)
    first.computed_tokens = 4000
    assert names(engine.plan(planner, 1.0))[0] == ("first", 1000)
    first.computed_tokens, first.output_tokens = 5000, 1
    plan = engine.plan(planner, 2.0)
    assert ("second" in dict(names(plan))) is second
    engine.running.remove(first)
    assert "second" in dict(names(engine.plan(planner, 3.0)))


def test_nobody_is_preempted_for_an_urgent_call() -> None:
    background = [decode("old", 400), decode("young", 400)]
    engine = FakeEngine(free_blocks=10, running=background, waiting=[prompt("urgent", 100, 0.1)])
    assert [call.call_id for call in planned(engine, PHASES).preempt] == ["young"]
    assert planned(engine, VARIANTS["slo_preempt_never"]).preempt == ()


def test_a_call_whose_objectives_are_at_stake_is_preempted_only_if_allowed_and_never_into_urgency() -> None:
    def preempted(tpot_s: float, phases: Phases) -> list[str]:
        call = decode("promised", 400, 1, Slo(tpot_s=tpot_s))
        engine = FakeEngine(free_blocks=10, running=[call], waiting=[prompt("urgent", 100, 0.1)])
        return [call.call_id for call in planned(engine, phases).preempt]

    assert preempted(9.0, PREEMPT_ANY) == ["promised"]
    assert preempted(9.0, PHASES) == []
    assert preempted(0.15, PREEMPT_ANY) == [], "0.15 s left, and 0.1 s to compute it again"


def test_no_decode_waits() -> None:
    calls = [decode("plain"), decode("loose", slo=Slo(tpot_s=0.2)), decode("tight", slo=Slo(tpot_s=0.04))]
    engine = FakeEngine(running=calls, waiting=[prompt("urgent", 200, 0.03015)])
    assert len(names(planned(engine, PHASES))) == 2
    assert len(names(planned(engine, VARIANTS["slo_pause_never"]))) == 4


def test_the_backlog_is_not_cut_to_what_arrivals_can_spare() -> None:
    def longest(phases: Phases) -> int:
        planner, started = scheduler((PLAIN, phases)), prompt("started", 100, 0.02 + 0.1)
        engine = FakeEngine(max_batch_tokens=4000, waiting=[started])
        engine.plan(planner)
        engine.waiting, engine.running = [prompt("lost", 9000, 0.01)], [started]
        started.computed_tokens, started.output_tokens = 100, 1
        return dict(names(engine.plan(planner, 1.0)))["lost"]

    assert longest(PHASES) == 399
    assert longest(VARIANTS["slo_spare_share_0"]) == 3999


# What holds for every composition.


ablations = st.sampled_from(EVERY)
known_costs = st.sampled_from((COSTS, None))


@settings(deadline=None, max_examples=examples(500))
@given(engine=engines(), ablation=ablations, costs=known_costs)
def test_a_plan_stays_within_budget_blocks_and_seats(engine: FakeEngine, ablation: Ablation, costs: object) -> None:
    check_plan(engine, engine.plan(scheduler(ablation, COSTS if costs else None), 3.0))


@settings(deadline=None, max_examples=examples(300))
@given(engine=engines(), ablation=ablations)
def test_the_same_inputs_give_the_same_plan(engine: FakeEngine, ablation: Ablation) -> None:
    planner = scheduler(ablation)
    plans = [engine.plan(planner, 3.0) for _ in range(3)]
    assert plans[0] == plans[1] == plans[2] == engine.plan(scheduler(ablation), 3.0)


@settings(deadline=None, max_examples=examples(300))
@given(engine=engines(), ablation=ablations)
def test_an_engine_that_can_do_something_does(engine: FakeEngine, ablation: Ablation) -> None:
    plan = engine.plan(scheduler(ablation), 3.0)
    if not plan.picks and not plan.preempt:
        assert not engine.plan(SCHEDULERS["hit_ratio"](), 3.0).picks


@settings(deadline=None, max_examples=examples(60))
@given(specs=call_specs, ablation=ablations)
def test_every_call_finishes_on_a_real_engine(specs: list[CallSpec], ablation: Ablation) -> None:
    check_every_call_finishes(SloScheduler(*ablation), specs)


@pytest.mark.parametrize("ablation", EVERY)
def test_the_work_of_a_plan_grows_with_the_queue_no_worse_than_in_proportion(ablation: Ablation) -> None:
    def looked_up(waiting: int) -> int:
        calls = [prompt(str(n), 50 + n % 700, 1.0 + n % 90 if n % 3 else None) for n in range(waiting)]
        engine = FakeEngine(free_blocks=300, waiting=calls, running=[decode(f"d{n}") for n in range(8)])
        engine.plan(scheduler(ablation))
        return engine.looked_up

    assert looked_up(4000) < 2.2 * looked_up(2000)
    assert looked_up(4000) < 3 * 4000
