"""The `slo` scheduler: each branch of its algorithm by example, and what holds for every engine it could meet."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.scheduling.in_order import GROUPS, HitRatio
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.moment import SloSettings
from plait.policy.scheduling.plan import LocalCall, MeasuringScheduler
from plait.policy.scheduling.slo_scheduler import SloScheduler
from plait.policy.types import Slo
from tests.examples import examples
from tests.policy.scheduling.fake_engine import (
    COSTS,
    FakeEngine,
    check_plan,
    decode,
    engines,
    names,
    prompt,
    slo_scheduler,
)
from tests.policy.scheduling.real_engine import CallSpec, call_specs, check_every_call_finishes

SETTINGS = [
    SloSettings(),
    SloSettings(long_tokens=20, default_slo=Slo(tpot_s=0.1875)),
    SloSettings(long_tokens=20, best_effort_share=0.0),
    SloSettings(max_preemptions=1),
]


def test_adapters_find_it_by_name_and_know_that_it_measures() -> None:
    assert isinstance(SCHEDULERS["slo"](), MeasuringScheduler)
    assert not isinstance(SCHEDULERS["fcfs"](), MeasuringScheduler)


# Order, urgency, budget.


def test_waiting_calls_run_in_ascending_remaining_time() -> None:
    engine = FakeEngine(max_batch_tokens=200, waiting=[prompt("loose", 100, 9.0), prompt("tight", 100, 1.0)])
    plan = engine.plan(slo_scheduler())
    assert names(plan) == [("tight", 100), ("loose", 100)]


def test_a_small_window_keeps_what_is_due_first_before_what_fits_better() -> None:
    engine = FakeEngine(max_batch_tokens=100, waiting=[prompt("loose", 100, 9.0), prompt("tight", 60, 2.0)])
    assert names(engine.plan(slo_scheduler())) == [("tight", 60), ("loose", 40)]
    engine.waiting[0].slo = Slo(ttft_s=2.5)
    assert names(engine.plan(slo_scheduler())) == [("loose", 100)], "within gamma the better fit goes first"


def test_urgent_calls_enter_before_better_fits() -> None:
    # T_max is the pivot's 0.1 s; 60 tokens at the pivot's 9,000 tokens/s take 7 ms more than the shortest iteration.
    engine = FakeEngine(max_batch_tokens=100, waiting=[prompt("fits", 100, 0.7), prompt("urgent", 60, 0.1)])
    assert names(engine.plan(slo_scheduler())) == [("urgent", 60), ("fits", 40)]


def test_the_tightest_token_deadline_sets_the_budget() -> None:
    call = decode("decode", output=1, slo=Slo(tpot_s=0.05001))
    engine = FakeEngine(running=[call], waiting=[prompt("prompt", 900, 5.0)])
    plan = engine.plan(slo_scheduler())
    assert names(plan) == [("decode", 1), ("prompt", 399)], "10 ms + 0.1 ms n <= 50 ms"
    assert plan.budget_tokens == 400


def test_prompts_get_a_floor_where_decodes_alone_are_too_slow() -> None:
    calls = [decode(f"decode-{n}", slo=Slo(tpot_s=0.0105)) for n in range(9)]
    engine = FakeEngine(running=calls, waiting=[prompt("prompt", 900, 5.0)])
    assert names(engine.plan(slo_scheduler()))[-1] == ("prompt", 100), "a tenth of the engine's 1,000"
    engine.max_batch_tokens = 15
    assert names(engine.plan(slo_scheduler()))[-1] == ("prompt", 2), "one would count as a decode, and not be admitted"


def test_a_budget_is_not_held_back_for_anything() -> None:
    waiting = [prompt("promised", 700, 5.0), prompt("plain", 50)]
    assert names(FakeEngine(waiting=waiting).plan(slo_scheduler())) == [("promised", 700), ("plain", 50)]
    waiting[0].prompt_tokens = 2000
    assert sorted(names(FakeEngine(waiting=waiting).plan(slo_scheduler()))) == [("plain", 50), ("promised", 950)]


def test_calls_without_objectives_get_at_least_a_tenth() -> None:
    waiting = [prompt("promised", 2000, 5.0), prompt("plain", 2000)]
    assert names(FakeEngine(waiting=waiting).plan(slo_scheduler())) == [("promised", 900), ("plain", 100)]


def test_a_call_that_cannot_meet_its_ttft_any_more_makes_way() -> None:
    engine = FakeEngine(max_batch_tokens=100, waiting=[prompt("lost", 90, 0.5), prompt("due", 100, 2.0)])
    assert names(engine.plan(slo_scheduler(), 0.6))[0] == ("due", 98), "2 % are for lost ones"


def test_an_unknown_engine_is_planned_for_without_a_time_limit() -> None:
    engine = FakeEngine(running=[decode("d", slo=Slo(tpot_s=0.02))], waiting=[prompt("prompt", 2000, 5.0)])
    plan = engine.plan(slo_scheduler(costs=None))
    assert (names(plan), plan.budget_tokens) == ([("d", 1), ("prompt", 999)], 1000)


# Long prompts.


@pytest.mark.parametrize(
    ("budget", "started"),
    [
        (5020, {"a", "short"}),
        (8000, {"a", "b", "short"}),  # the first is through, and nobody else wants what is left
    ],
)
def test_one_long_prompt_at_a_time(budget: int, started: set[str]) -> None:
    waiting = [prompt(name, 5000, ttft_s) for name, ttft_s in (("a", 9.0), ("b", 9.1))] + [prompt("short", 50, 9.2)]
    engine = FakeEngine(max_batch_tokens=budget, waiting=waiting)
    assert {name for name, _ in names(engine.plan(slo_scheduler()))} == started


def test_the_next_long_prompt_starts_when_the_first_is_prefilled() -> None:
    scheduler = slo_scheduler()
    first, other = prompt("first", 5000, 50.0), prompt("second", 5000, 60.0)
    engine = FakeEngine(max_batch_tokens=4000, waiting=[first, other])
    assert [name for name, _ in names(engine.plan(scheduler))] == ["first"]
    engine.waiting.remove(first)
    engine.running.append(first)
    first.computed_tokens = 4000
    assert names(engine.plan(scheduler, 1.0))[0] == ("first", 1000)
    first.computed_tokens, first.output_tokens = 5000, 1
    assert "second" in dict(names(engine.plan(scheduler, 2.0)))
    engine.running.remove(first)
    assert "second" in dict(names(engine.plan(scheduler, 3.0)))


def test_an_urgent_long_prompt_is_exempt() -> None:
    waiting = [prompt("a", 5000, 9.0), prompt("urgent", 5000, 0.6)]
    engine = FakeEngine(max_batch_tokens=20_000, waiting=waiting)
    scheduler = slo_scheduler()
    assert [name for name, _ in names(engine.plan(scheduler))] == ["urgent", "a"]


# Blocks: preemption.


def test_decodes_without_a_block_take_that_of_the_largest_remaining_time() -> None:
    calls = [
        decode(name, 8, 1, slo)
        for name, slo in (("plain", None), ("loose", Slo(tpot_s=9.0)), ("tight", Slo(tpot_s=0.1)))
    ]
    engine = FakeEngine(free_blocks=1, running=calls, waiting=[prompt("new", 1, 5.0)])
    plan = engine.plan(slo_scheduler())
    assert [call.call_id for call in plan.preempt] == ["plain"]
    assert [name for name, _ in names(plan)] == ["tight", "loose"], "and nobody is admitted to what it gave up"


def test_an_urgent_call_takes_the_blocks_of_one_without_objectives() -> None:
    background = [decode("old", 400), decode("young", 400)]
    engine = FakeEngine(free_blocks=10, running=background, waiting=[prompt("urgent", 100, 0.1)])
    plan = engine.plan(slo_scheduler())
    assert [call.call_id for call in plan.preempt] == ["young"]
    assert names(plan) == [("old", 1), ("urgent", 100)]


@pytest.mark.parametrize(
    ("tokens", "ttft_s"), [(100, 5.0), (5000, 0.55)], ids=["it is not urgent", "it would not be enough"]
)
def test_nobody_is_preempted_without_need(tokens: int, ttft_s: float) -> None:
    background = [decode("old", 400), decode("young", 400)]
    engine = FakeEngine(free_blocks=10, running=background, waiting=[prompt("new", tokens, ttft_s)])
    plan = engine.plan(slo_scheduler())
    assert (plan.preempt, names(plan)) == ((), [("old", 1), ("young", 1)])


def test_a_call_whose_objectives_are_at_stake_is_not_preempted() -> None:
    call = decode("promised", 400, 1, Slo(tpot_s=9.0))
    engine = FakeEngine(free_blocks=10, running=[call], waiting=[prompt("urgent", 100, 0.1)])
    assert engine.plan(slo_scheduler()).preempt == ()


def test_a_running_call_that_has_missed_its_ttft_makes_way_too() -> None:
    scheduler, late = slo_scheduler(), prompt("late", 400, 0.5)
    engine = FakeEngine(free_blocks=200, waiting=[late])
    engine.plan(scheduler)
    late.computed_tokens, late.output_tokens = 400, 1
    engine.free_blocks, engine.running, engine.waiting = 10, [late], [prompt("urgent", 100, 0.1, arrived_s=0.6)]
    assert [call.call_id for call in engine.plan(scheduler, 0.6).preempt] == ["late"]


def test_of_those_that_can_spare_it_the_one_with_the_least_to_compute_again_makes_way() -> None:
    background = [decode("small", 200), decode("large", 400)]
    engine = FakeEngine(free_blocks=10, running=background, waiting=[prompt("urgent", 100, 0.1)])
    assert [call.call_id for call in engine.plan(slo_scheduler()).preempt] == ["small"]


def test_a_call_makes_way_a_limited_number_of_times() -> None:
    victim, scheduler = decode("victim", 400), slo_scheduler(SloSettings(max_preemptions=2))
    engine = FakeEngine(free_blocks=10)
    preempted = 0
    for turn in range(4):
        engine.running, engine.waiting = [victim], [prompt(f"urgent-{turn}", 100, 0.1, arrived_s=float(turn))]
        preempted += len(engine.plan(scheduler, float(turn)).preempt)
        engine.running, engine.waiting = [], [victim]
        if preempted > turn:
            engine.plan(scheduler, turn + 0.5)
    assert preempted == 2


# Decodes that wait, iterations that stay short, calls that are late already.


def test_decodes_wait_for_a_first_token_that_is_in_time_only_without_them() -> None:
    calls = [decode("plain"), decode("loose", slo=Slo(tpot_s=0.2)), decode("tight", slo=Slo(tpot_s=0.04))]
    engine = FakeEngine(running=calls, waiting=[prompt("urgent", 200, 0.03015)])
    scheduler = slo_scheduler()
    assert names(engine.plan(scheduler)) == [("tight", 1), ("urgent", 200)], "10 ms, and 0.1 ms for each of 201 tokens"
    assert engine.plan(scheduler) == engine.plan(scheduler), "the same moment, the same plan"
    engine.waiting = [prompt("another", 200, 0.03015, arrived_s=0.03)]
    assert names(engine.plan(scheduler, 0.03))[:3] == [("plain", 1), ("loose", 1), ("tight", 1)], "not twice in a row"


@pytest.mark.parametrize("tpot_s", [0.03, 0.035], ids=["the prompt is cut", "the prompt fits"])
def test_decodes_do_not_wait_in_vain_nor_without_need(tpot_s: float) -> None:
    calls = [decode("plain"), *(decode(f"tight-{n}", slo=Slo(tpot_s=tpot_s)) for n in range(5))]
    engine = FakeEngine(running=calls, waiting=[prompt("urgent", 200, 0.0302)])
    assert ("plain", 1) in names(engine.plan(slo_scheduler())), "the others cannot wait, and it is too late with them"
    engine = FakeEngine(running=calls[:1], waiting=[prompt("urgent", 200, 0.0302)])
    assert names(engine.plan(slo_scheduler())) == [("plain", 1), ("urgent", 200)]


def test_what_is_not_urgent_is_cut_to_what_arrivals_can_spare() -> None:
    def longest(spare_s: float) -> int:
        scheduler = slo_scheduler()
        started = prompt("started", 100, 0.02 + spare_s)
        engine = FakeEngine(max_batch_tokens=4000, waiting=[started])
        engine.plan(scheduler)
        engine.waiting, engine.running = [prompt("lost", 9000, 0.01)], [started]
        started.computed_tokens, started.output_tokens = 100, 1
        return dict(names(engine.plan(scheduler, 1.0)))["lost"]

    assert longest(0.4) == 1899, "half of 0.4 s, the decode beside it"
    assert longest(0.1) == 399
    assert longest(0.03) == 222, "16 ms, when an iteration takes at least 10 ms: 3.2 of those"
    assert longest(9.0) == 3999


def test_an_iteration_stays_short_while_calls_with_a_ttft_have_come_lately() -> None:
    scheduler, started = slo_scheduler(), prompt("started", 100, 0.42001)
    engine = FakeEngine(max_batch_tokens=4000, waiting=[started])
    engine.plan(scheduler)
    engine.waiting, engine.running = [prompt("plain", 9000)], [started]
    started.computed_tokens, started.output_tokens = 100, 1
    engine.plan(scheduler, 1.0)
    engine.running = []
    assert names(engine.plan(scheduler, 30.0)) == [("plain", 1900)]
    assert names(engine.plan(scheduler, 90.0)) == [("plain", 4000)]


def test_late_calls_go_by_time_waited_over_kv_time_to_come() -> None:
    waiting = [prompt("large", 3000, 0.1), prompt("small", 100, 0.01, arrived_s=1.0)]
    engine = FakeEngine(max_batch_tokens=50, waiting=waiting)
    assert names(engine.plan(slo_scheduler(), 2.0)) == [("small", 50)]
    assert names(engine.plan(slo_scheduler(), 1.02)) == [("large", 50)], "it has waited fifty times as long"


def test_a_late_call_that_finds_no_room_is_passed_for_a_while_only() -> None:
    def plan(now_s: float) -> list[str]:
        waiting = [prompt("large", 3000, 0.1), prompt("small", 300, 0.01, arrived_s=now_s - 0.02)]
        engine = FakeEngine(free_blocks=200, running=[decode("d")], waiting=waiting)
        return [name for name, _ in names(engine.plan(slo_scheduler(), now_s))]

    assert plan(0.5) == ["d", "small"]
    assert plan(60.0) == ["d"]


def test_late_calls_go_before_those_without_objectives_who_have_their_tenth() -> None:
    waiting = [*(prompt(f"plain-{n}", 100) for n in range(3)), *(prompt(f"late-{n}", 100, 0.1) for n in range(3))]
    engine = FakeEngine(max_batch_tokens=300, waiting=waiting)
    taken = names(engine.plan(slo_scheduler(), 1.0))
    assert taken == [("late-0", 100), ("late-1", 100), ("late-2", 70), ("plain-0", 30)]


def test_a_late_call_does_not_wait_for_a_long_prompt_without_objectives() -> None:
    running = prompt("long", 5000)
    running.computed_tokens = 1000
    engine = FakeEngine(
        max_batch_tokens=1000, running=[running], waiting=[prompt("plain", 10), prompt("late", 100, 0.1)]
    )
    assert names(engine.plan(slo_scheduler(), 1.0)) == [("late", 100), ("long", 900)]


def test_late_calls_do_not_take_the_blocks_that_one_without_objectives_waits_for() -> None:
    waiting = [prompt("plain", 400), prompt("late", 20, 0.1)]
    engine = FakeEngine(free_blocks=50, running=[decode("d")], waiting=waiting)
    assert names(engine.plan(slo_scheduler(), 1.0)) == [("d", 1)]


def test_a_job_beyond_its_jct_makes_way() -> None:
    job = LocalCall("job", 0.0, 100, slo=Slo(jct_s=1.0))
    engine = FakeEngine(max_batch_tokens=100, waiting=[job, prompt("due", 100, 0.5, arrived_s=1.0)])
    assert names(engine.plan(slo_scheduler(), 1.1))[0][0] == "due"


# What holds always.


settings_of_users = st.sampled_from(SETTINGS)
known_costs = st.sampled_from((COSTS, None))


@settings(deadline=None, max_examples=examples(500))
@given(engine=engines(), chosen=settings_of_users, costs=known_costs)
def test_a_plan_stays_within_budget_blocks_and_seats(engine: FakeEngine, chosen: SloSettings, costs: object) -> None:
    check_plan(engine, engine.plan(slo_scheduler(chosen, COSTS if costs else None), 3.0))


@settings(deadline=None, max_examples=examples(300))
@given(engine=engines(), chosen=settings_of_users)
def test_the_same_inputs_give_the_same_plan(engine: FakeEngine, chosen: SloSettings) -> None:
    scheduler = slo_scheduler(chosen)
    plans = [engine.plan(scheduler, 3.0) for _ in range(3)]
    assert plans[0] == plans[1] == plans[2] == engine.plan(slo_scheduler(chosen), 3.0)


@settings(deadline=None, max_examples=examples(300))
@given(engine=engines(), chosen=settings_of_users)
def test_an_engine_that_can_do_something_does(engine: FakeEngine, chosen: SloSettings) -> None:
    plan = engine.plan(slo_scheduler(chosen), 3.0)
    if not plan.picks and not plan.preempt:
        assert not engine.plan(SCHEDULERS["hit_ratio"](), 3.0).picks


@settings(deadline=None, max_examples=examples(200))
@given(engine=engines())
def test_without_objectives_it_plans_as_hit_ratio_does(engine: FakeEngine) -> None:
    for call in engine.running + engine.waiting:
        call.slo = None
    assert engine.plan(slo_scheduler(), 3.0) == engine.plan(HitRatio(), 3.0)


@settings(deadline=None, max_examples=examples(200))
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    ttft_s=st.lists(st.floats(1.0, 9.0), min_size=8, max_size=8),
)
def test_a_light_load_is_all_taken_at_once(sizes: list[int], ttft_s: list[float]) -> None:
    waiting = [prompt(str(at), size, ttft_s[at]) for at, size in enumerate(sizes)]
    plan = FakeEngine(waiting=waiting).plan(slo_scheduler())
    assert sorted(names(plan)) == sorted((str(at), size) for at, size in enumerate(sizes))


# The real embedded engine.


@settings(deadline=None, max_examples=examples(60))
@given(specs=call_specs, chosen=settings_of_users)
def test_every_call_finishes_on_a_real_engine(specs: list[CallSpec], chosen: SloSettings) -> None:
    check_every_call_finishes(SloScheduler(chosen), specs)


# Waiting is bounded, and so is the work.


@settings(deadline=None, max_examples=30)
@given(arrivals=st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=25))
def test_the_pth_call_of_a_group_is_picked_within_the_bound(arrivals: list[list[int]]) -> None:
    """One call a plan is taken, while promised calls take as much as they may."""
    scheduler, weight = slo_scheduler(), GROUPS * (GROUPS + 1) // 2
    engine = FakeEngine(max_batch_tokens=200)
    since: dict[LocalCall, tuple[int, int, int]] = {}
    picks = number = 0
    for step in [*arrivals, *[[]] * sum(map(len, arrivals))]:
        for group in step:
            call = prompt(f"plain-{number}", 40)
            engine.cached[call.call_id] = 4 * group
            position = 1 + sum(waiting in since and since[waiting][0] == group for waiting in engine.waiting)
            since[call] = (group, position, picks)
            engine.waiting.append(call)
            number += 1
        busy = prompt("promised", 10_000, 50.0)
        engine.waiting.insert(0, busy)
        plan = engine.plan(scheduler, 0.0)
        taken = [call for call, _ in plan.picks if call in since][:1]
        assert taken or not set(engine.waiting) & set(since), "they have their tenth"
        engine.waiting.remove(busy)
        for call in taken:
            picks += 1
            engine.waiting.remove(call)
            group, position, before = since.pop(call)
            assert picks - before <= ceil(weight * position / (group + 1)) + weight
    assert not since


@pytest.mark.parametrize("chosen", SETTINGS)
def test_the_work_of_a_plan_grows_with_the_queue_no_worse_than_in_proportion(chosen: SloSettings) -> None:
    def looked_up(waiting: int) -> int:
        calls = [prompt(str(n), 50 + n % 700, 1.0 + n % 90 if n % 3 else None) for n in range(waiting)]
        engine = FakeEngine(free_blocks=300, waiting=calls, running=[decode(f"d{n}") for n in range(8)])
        engine.plan(slo_scheduler(chosen))
        return engine.looked_up

    assert looked_up(4000) < 2.2 * looked_up(2000)
    assert looked_up(4000) < 3 * 4000
