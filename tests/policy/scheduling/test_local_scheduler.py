"""The local schedulers: what every plan keeps to, whatever the engine looks like, and whom each policy admits next."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.scheduling.in_order import MAX_BACKFILL_CALLS, HitRatio, LongestPrefix
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import LocalCall, Plan
from tests.examples import examples
from tests.policy.scheduling.unshared_blocks import UnsharedBlocks

BLOCK_TOKENS = 4


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass
class Engine(UnsharedBlocks):
    """Facts of an engine whose calls share no blocks: a call owns what it computed, and finds `cached` at admission."""

    max_batch_tokens: int = 100
    max_running_calls: int = 10
    free_blocks: int = 100
    cached: dict[str, int] = field(default_factory=dict)
    waiting: list[LocalCall] = field(default_factory=list)
    running: list[LocalCall] = field(default_factory=list)
    in_flight = None

    def cached_tokens(self, call: LocalCall) -> int:
        return self.cached.get(call.call_id, 0)

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        if call in self.running:
            return blocks(call.computed_tokens + new_tokens) - blocks(call.computed_tokens)
        return blocks(self.cached_tokens(call) + new_tokens)

    def blocks_freed(self, call: LocalCall) -> int:
        return blocks(call.computed_tokens)

    def plan(self, policy: str = "fcfs") -> Plan:
        return SCHEDULERS[policy]().plan(0.0, self.waiting, self.running, self)

    def picked_blocks(self, plan: Plan) -> int:
        return sum(self.blocks_needed(call, tokens) for call, tokens in plan.picks)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    engine = Engine(
        max_batch_tokens=draw(st.integers(1, 60)),
        max_running_calls=draw(st.integers(1, 6)),
        free_blocks=draw(st.integers(0, 20)),
    )
    for number in range(draw(st.integers(0, engine.max_running_calls))):
        prompt, output = draw(st.integers(1, 40)), draw(st.integers(0, 5))
        computed = draw(st.integers(0, prompt - 1)) if output == 0 else prompt + output - 1
        engine.running.append(LocalCall(f"running-{number}", float(number), prompt, computed, output))
    for number in range(draw(st.integers(0, 6))):
        call = LocalCall(f"waiting-{number}", 10.0 + number, draw(st.integers(1, 40)), 0, draw(st.integers(0, 2)))
        engine.cached[call.call_id] = draw(st.integers(0, blocks(call.uncomputed_tokens) - 1)) * BLOCK_TOKENS
        engine.waiting.append(call)
    return engine


@pytest.mark.parametrize("policy", SCHEDULERS)
@settings(deadline=None, max_examples=examples(300))
@given(engine=engines())
def test_a_plan_stays_within_budget_blocks_and_seats(policy: str, engine: Engine) -> None:
    plan = engine.plan(policy)
    freed = sum(engine.blocks_freed(call) for call in plan.preempt)
    assert sum(tokens for _, tokens in plan.picks) <= engine.max_batch_tokens
    assert engine.picked_blocks(plan) <= engine.free_blocks + freed
    assert all(0 < tokens <= call.uncomputed_tokens - engine.cached_tokens(call) for call, tokens in plan.picks)
    admitted = [call for call, _ in plan.picks if call in engine.waiting]
    assert len(engine.running) - len(plan.preempt) + len(admitted) <= engine.max_running_calls


@settings(deadline=None, max_examples=examples(300))
@given(engine=engines())
def test_calls_run_in_the_order_of_their_arrival(engine: Engine) -> None:
    plan = engine.plan()
    picked = [call for call, _ in plan.picks]
    staying = engine.running[: len(engine.running) - len(plan.preempt)]
    running = [call for call in picked if call in engine.running]
    admitted = [call for call in picked if call in engine.waiting]
    assert picked == running + admitted
    assert running == staying[: len(running)]
    assert admitted == engine.waiting[: len(admitted)]
    assert list(plan.preempt) == engine.running[len(staying) :][::-1], "the latest arrival goes first"


@pytest.mark.parametrize("policy", SCHEDULERS)
@settings(deadline=None, max_examples=examples(300))
@given(engine=engines())
def test_the_policies_differ_only_in_whom_they_admit(policy: str, engine: Engine) -> None:
    plan, fcfs = engine.plan(policy), engine.plan()
    assert plan.preempt == fcfs.preempt
    assert plan.picks[: len(engine.running)] == fcfs.picks[: len(engine.running)]


@pytest.mark.parametrize("policy", SCHEDULERS)
@settings(deadline=None, max_examples=examples(300))
@given(engine=engines())
def test_a_call_is_picked_or_may_fill_up_or_is_held_back(policy: str, engine: Engine) -> None:
    plan = engine.plan(policy)
    named = [call for call, _ in plan.picks] + list(plan.backfill) + list(plan.preempt)
    assert len({id(call) for call in named}) == len(named)
    assert {id(call) for call in engine.running} <= {id(call) for call in named}
    if plan.preempt:
        assert not any(call in engine.waiting for call in named), "what was freed is for those who lacked it"


@pytest.mark.parametrize("policy", SCHEDULERS)
@settings(deadline=None, max_examples=examples(300))
@given(engine=engines())
def test_nobody_is_preempted_for_nothing(policy: str, engine: Engine) -> None:
    plan = engine.plan(policy)
    if not plan.preempt:
        return
    last = plan.preempt[-1]
    spared = engine.free_blocks + sum(engine.blocks_freed(call) for call in plan.preempt[:-1])
    budget = engine.max_batch_tokens - sum(tokens for _, tokens in plan.picks)
    need = engine.picked_blocks(plan) + engine.blocks_needed(last, min(last.uncomputed_tokens, budget))
    assert need > spared
    assert all(call in engine.running for call, _ in plan.picks), "nor admitted at once to what was freed"


@settings(deadline=None, max_examples=examples(300))
@given(engine=engines())
def test_nothing_is_left_idle_that_the_next_call_could_use(engine: Engine) -> None:
    plan = engine.plan()
    budget = engine.max_batch_tokens - sum(tokens for _, tokens in plan.picks)
    if plan.preempt or budget == 0:
        return
    assert [(call, call.uncomputed_tokens) for call in engine.running] == list(plan.picks[: len(engine.running)])
    left = engine.waiting[len(plan.picks) - len(engine.running) :]
    if left and len(plan.picks) < engine.max_running_calls:
        tokens = min(left[0].uncomputed_tokens - engine.cached_tokens(left[0]), budget)
        assert engine.blocks_needed(left[0], tokens) > engine.free_blocks - engine.picked_blocks(plan)


@pytest.mark.parametrize("policy", SCHEDULERS)
@settings(deadline=None)
@given(engine=engines())
def test_the_same_engine_gives_the_same_plan_and_is_left_alone(policy: str, engine: Engine) -> None:
    before = [copy(call) for call in engine.waiting + engine.running]
    scheduler = SCHEDULERS[policy]()
    plans = [scheduler.plan(0.0, engine.waiting, engine.running, engine) for _ in range(2)]
    assert plans[0] == plans[1] == engine.plan(policy)
    after = [copy(call) for call in engine.waiting + engine.running]
    assert [repr(call) for call in before] == [repr(call) for call in after]


def test_a_prompt_is_cut_where_the_budget_ends() -> None:
    decode, prompt = LocalCall("decode", 0.0, 8, 8, 1), LocalCall("prompt", 1.0, 50)
    engine = Engine(max_batch_tokens=21, running=[decode], waiting=[prompt, LocalCall("next", 2.0, 5)])
    assert engine.plan().picks == ((decode, 1), (prompt, 20))


def test_what_is_cached_is_not_computed_again() -> None:
    call = LocalCall("call", 0.0, 50)
    assert Engine(cached={"call": 48}, waiting=[call]).plan().picks == ((call, 2),)


def test_the_first_that_does_not_fit_holds_back_the_rest() -> None:
    big, small = LocalCall("big", 0.0, 40), LocalCall("small", 1.0, 4)
    assert Engine(free_blocks=9, waiting=[big, small]).plan().picks == ()


def test_the_oldest_takes_the_room_of_the_latest() -> None:
    calls = [LocalCall(str(number), float(number), 8, 8, 1) for number in range(3)]
    plan = Engine(free_blocks=1, running=calls, waiting=[LocalCall("new", 9.0, 1)]).plan()
    assert (plan.preempt, plan.picks) == ((calls[2],), ((calls[0], 1), (calls[1], 1)))


def test_a_call_that_nobody_can_make_room_for_is_preempted_itself() -> None:
    call = LocalCall("call", 0.0, 8, 8, 1)
    assert Engine(free_blocks=0, running=[call]).plan() == Plan((call,), ())


def test_who_finds_no_room_comes_first_in_the_backfill() -> None:
    big, small = LocalCall("big", 0.0, 40), LocalCall("small", 1.0, 4)
    assert Engine(free_blocks=9, waiting=[big, small]).plan().backfill == (big, small)


def test_the_backfill_is_no_longer_than_an_iteration_can_use() -> None:
    waiting = [LocalCall(str(number), float(number), 100) for number in range(100)]
    plan = Engine(max_batch_tokens=150, max_running_calls=99, waiting=waiting).plan()
    assert [call for call, _ in plan.picks] == waiting[:2]
    assert plan.backfill == tuple(waiting[2 : 2 + MAX_BACKFILL_CALLS])


def test_the_longest_cached_prefix_goes_first_then_priority_then_arrival() -> None:
    calls = [LocalCall(str(n), float(n), 60, priority=priority) for n, priority in enumerate((0, 0, -1, 0))]
    engine = Engine(max_batch_tokens=500, waiting=calls, cached={"0": 8, "1": 16, "2": 8, "3": 16})
    picks = LongestPrefix().plan(0.0, engine.waiting, engine.running, engine).picks
    assert [call.call_id for call, _ in picks] == ["1", "3", "2", "0"]


def test_hit_ratio_admits_the_groups_by_turns_and_each_in_order_of_priority_and_arrival() -> None:
    cold = [LocalCall(f"cold-{n}", float(n), 40) for n in range(8)]
    warm = [LocalCall(f"warm-{n}", 10.0 + n, 40, priority=-n) for n in range(8)]
    engine = Engine(max_batch_tokens=1000, max_running_calls=20, free_blocks=500, waiting=cold + warm)
    engine.cached = {call.call_id: 36 for call in warm}
    order = [call.call_id for call, _ in HitRatio().plan(0.0, engine.waiting, [], engine).picks]
    assert order[:3] == ["warm-7", "cold-0", "warm-6"], "both start even; then ten turns to one"
    assert [call for call in order if "cold" in call] == [call.call_id for call in cold]
    assert [call for call in order if "warm" in call] == [call.call_id for call in reversed(warm)]


def test_a_turn_counts_once_the_call_has_left_the_queue() -> None:
    cold, warm = LocalCall("cold", 0.0, 40), [LocalCall(f"warm-{n}", 1.0 + n, 40) for n in range(3)]
    engine = Engine(max_batch_tokens=4, cached={call.call_id: 36 for call in warm}, waiting=[cold, *warm])
    scheduler = HitRatio()
    plans = [scheduler.plan(0.0, engine.waiting, [], engine) for _ in range(3)]
    assert [plan.picks for plan in plans] == [((warm[0], 4),)] * 3, "the engine did not take it: it stays the first"
    engine.waiting.remove(warm[0])
    assert scheduler.plan(0.0, engine.waiting, [], engine).picks == ((cold, 4),)
    engine.waiting.remove(cold)
    assert scheduler.plan(0.0, engine.waiting, [], engine).picks == ((warm[1], 4),)
