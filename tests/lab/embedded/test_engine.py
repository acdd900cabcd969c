"""The engine core in virtual time: random calls, aborts and small caches against what must hold for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import KvState, StoredRun
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, root_hash
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from tests.examples import examples
from tests.invariants import check

ROOT = root_hash("m")
COSTS = CostModel(PiecewiseLinear(((1, 0.01),), 1e-4), 0.0, 1e-6, 0.0, LongAttention())


class Recorder:
    """A cost model that remembers the batches it was asked about."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []

    def iteration_time_s(self, work: Iterable[tuple[int, int]]) -> float:
        self.batches.append(list(work))
        return COSTS.iteration_time_s(self.batches[-1])


class PreemptsAll:
    """Starts whatever waits, and preempts whatever runs."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        del now_s, facts
        return Plan(tuple(running), tuple((call, call.uncomputed_tokens) for call in waiting))


@dataclass(frozen=True)
class Spec:
    """A call to come: `shared` tokens of its `family`, then some of its own; aborted after so many steps, or never."""

    gap_steps: int
    family: int
    shared: int
    own: int
    output: int
    abort_after: int | None = None

    def prompt(self, number: int) -> list[int]:
        return [self.family] * self.shared + [100 + number] * self.own


SPECS = st.lists(
    st.builds(
        Spec,
        gap_steps=st.integers(0, 4),
        family=st.integers(0, 1),
        shared=st.sampled_from((0, 16, 64, 100, 192)),
        own=st.sampled_from((1, 16, 48, 64, 130)),
        output=st.sampled_from((1, 2, 5, 17, 40)),
        abort_after=st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=12,
)
NO_ABORTS = SPECS.map(lambda specs: [Spec(s.gap_steps, s.family, s.shared, s.own, s.output) for s in specs])
BLOCK_TOKENS = st.sampled_from((1, 16, 48, 64, 80, 128))
AHEAD = st.sampled_from((0, 1))


def new_engine(*, costs: Any = COSTS, kv_tokens: int = 100_000, block_tokens: int = 16, **more: Any) -> Engine:
    scheduler = more.pop("scheduler", "fcfs")  # whose order is plain to see
    settings = EngineSettings(
        name="e", model="m", kv_tokens=kv_tokens, block_tokens=block_tokens, scheduler=scheduler, **more
    )
    return Engine(settings, cast("CostModel", costs))


def new_call(
    engine: Engine, tokens: Sequence[int], output: int, *, name: str = "c", now_s: float = 0.0
) -> EmbeddedCall:
    chain = HashChain(engine.settings.block_tokens, ROOT, tokens)
    same = engine.settings.block_tokens == TREE_BLOCK_TOKENS
    tree_chain = chain if same else HashChain(TREE_BLOCK_TOKENS, ROOT, tokens)
    return EmbeddedCall(
        *(name, now_s, len(tokens)),
        chain=chain,
        tree_chain=tree_chain,
        max_output_tokens=output,
        final_output_tokens=output,
    )


@dataclass
class Drive:
    """Runs specs on an engine, step by step, checking what must hold after each of them."""

    engine: Engine
    recorder: Recorder
    calls: list[EmbeddedCall] = field(default_factory=list)
    tokens: dict[EmbeddedCall, int] = field(default_factory=dict)
    finished: list[EmbeddedCall] = field(default_factory=list)
    aborted: set[EmbeddedCall] = field(default_factory=set)
    log: list[tuple[float, tuple[str, ...], float | None]] = field(default_factory=list)
    now_s: float = 0.0

    def run(self, specs: Sequence[Spec]) -> None:
        due: list[tuple[int, int]] = []
        arrivals, at = [], 0
        for spec in specs:
            at += spec.gap_steps
            arrivals.append(at)
        for step in count():
            for number, spec in enumerate(specs):
                if arrivals[number] == step:
                    self.add(spec, number)
                    if spec.abort_after is not None:
                        due.append((step + spec.abort_after, number))
            for when, number in due:
                if when == step:
                    self.abort(self.calls[number])
            if not self.step() and step >= max([at, *(when for when, _ in due)]):
                return

    def add(self, spec: Spec, number: int) -> None:
        call = new_call(self.engine, spec.prompt(number), spec.output, name=f"c{number}", now_s=self.now_s)
        self.calls.append(call)
        self.tokens[call] = 0
        self.engine.add(call)

    def abort(self, call: EmbeddedCall) -> None:
        if call not in self.finished:
            self.aborted.add(call)
        self.engine.abort(call)
        assert call not in self.engine.running
        self.check_kv()

    def step(self) -> bool:
        """One iteration; False once there is nothing to do."""
        before = len(self.recorder.batches)
        step = self.engine.step(self.now_s)
        for output in step.outputs:
            assert output.call not in self.aborted, "an aborted call says nothing more"
            assert output.call not in self.finished
            self.tokens[output.call] += 1
            assert output.finished == (self.tokens[output.call] == output.call.final_output_tokens)
            if output.finished:
                self.finished.append(output.call)
        self.log.append((self.now_s, tuple(output.call.call_id for output in step.outputs), step.ends_s))
        assert (step.ends_s is None) == (len(self.recorder.batches) == before) == self.engine.idle
        if step.ends_s is None:
            assert not self.engine.waiting, "calls wait and nothing runs"
            assert not self.engine.running
        else:
            self.check_batch(step.ends_s)
            self.now_s = step.ends_s
        self.check_kv()
        self.check_journal()
        return step.ends_s is not None

    def check_batch(self, ends_s: float) -> None:
        batch, settings = self.recorder.batches[-1], self.engine.settings
        assert ends_s == self.now_s + COSTS.iteration_time_s(batch)
        assert 0 < sum(new for new, _ in batch) <= settings.max_batch_tokens
        assert all(new > 0 for new, _ in batch)
        assert max(len(batch), len(self.engine.running)) <= settings.max_running_calls
        # A call whose last token is in flight is not planned any more, and so not preempted for an earlier one either.
        goes_on = [call for call in self.engine.running if call.output_tokens < call.final_output_tokens]
        order = [self.calls.index(call) for call in goes_on]
        assert order == sorted(order), "first come, first served"
        waiting = [self.calls.index(call) for call in self.engine.waiting]
        assert waiting == sorted(waiting)
        assert not (order and waiting) or order[-1] < waiting[0], "nobody overtakes"

    def check_kv(self) -> None:
        engine = self.engine
        check(engine._blocks.cache)
        kv = engine.cache_state(engine.journal.cursor).kv
        in_use = {block for call in engine.running for block in call.blocks}
        assert kv.free_blocks + kv.cached_blocks + len(in_use) == kv.total_blocks
        assert all(call.computed_tokens <= len(call.blocks) * engine.settings.block_tokens for call in engine.running)

    def check_journal(self) -> None:
        """A tree block is reported exactly while all of its KV blocks are there."""
        engine = self.engine
        expected = set()
        for call in self.calls:
            whole = engine._blocks.cache.match(call.chain.hashes) * engine.settings.block_tokens // TREE_BLOCK_TOKENS
            expected |= set(call.tree_chain.hashes[:whole])
        _, stored, _ = engine.journal.since(None)
        assert {block for run in stored for block in run.hashes} == expected


def drive(specs: Sequence[Spec], **options: int) -> Drive:
    recorder = Recorder()
    run = Drive(new_engine(costs=recorder, **options), recorder)
    run.run(specs)
    return run


@settings(max_examples=examples(100))
@pytest.mark.no_cover
@given(
    specs=SPECS,
    block_tokens=BLOCK_TOKENS,
    kv_tokens=st.sampled_from((400, 448, 640, 1_280, 100_000)),
    max_batch_tokens=st.sampled_from((1, 16, 50, 2_048)),
    max_running_calls=st.sampled_from((1, 3, 256)),
    ahead=AHEAD,
)
def test_every_call_ends_with_its_tokens_and_leaves_nothing_behind(specs: list[Spec], **options: int) -> None:
    run = drive(specs, **options)
    engine = run.engine
    assert set(run.finished) | run.aborted == set(run.calls)
    assert all(run.tokens[call] == call.final_output_tokens for call in run.finished)
    kv = engine.cache_state().kv
    assert kv.free_blocks + kv.cached_blocks == kv.total_blocks == options["kv_tokens"] // options["block_tokens"]
    counters = engine.counters
    assert counters.calls == len(specs)
    assert counters.aborted_calls == len(run.aborted)
    assert counters.output_tokens == sum(run.tokens.values())
    assert counters.iterations == len(run.recorder.batches)


@pytest.mark.no_cover
@given(specs=NO_ABORTS, block_tokens=BLOCK_TOKENS, max_batch_tokens=st.sampled_from((16, 100, 2_048)), ahead=AHEAD)
def test_without_preemption_every_token_is_computed_once(specs: list[Spec], **options: int) -> None:
    run = drive(specs, **options)
    assert run.engine.counters.preemptions == 0
    computed = sum(new for batch in run.recorder.batches for new, _ in batch)
    cached = {call: call.cached_tokens or 0 for call in run.calls}
    expected = sum(call.prompt_tokens - cached[call] + call.final_output_tokens - 1 for call in run.calls)
    assert computed == expected
    assert run.engine.counters.computed_prompt_tokens == sum(c.prompt_tokens - cached[c] for c in run.calls)
    assert run.engine.counters.cached_prompt_tokens == sum(cached.values())


@given(specs=NO_ABORTS, block_tokens=BLOCK_TOKENS, ahead=AHEAD)
def test_one_call_after_another_finds_all_whole_blocks_that_earlier_ones_computed(
    specs: list[Spec], block_tokens: int, ahead: int
) -> None:
    engine = new_engine(block_tokens=block_tokens, ahead=ahead)
    seen: list[list[int]] = []
    for number, spec in enumerate(specs):
        tokens = spec.prompt(number)
        call = new_call(engine, tokens, spec.output)
        engine.add(call)
        run_until_idle(engine)
        shared = max((common(tokens, earlier) for earlier in seen), default=0)
        assert call.cached_tokens == min(shared, len(tokens) - 1) // block_tokens * block_tokens
        seen.append(tokens + [0] * (spec.output - 1))  # the last token is sent, never computed


@given(specs=SPECS, block_tokens=BLOCK_TOKENS, kv_tokens=st.sampled_from((448, 640)))
def test_the_same_calls_give_the_same_steps(specs: list[Spec], block_tokens: int, kv_tokens: int) -> None:
    first, second = (drive(specs, block_tokens=block_tokens, kv_tokens=kv_tokens) for _ in range(2))
    assert first.log == second.log
    assert first.engine.counters == second.engine.counters
    assert first.engine.cache_state() == second.engine.cache_state()


def run_until_idle(engine: Engine, now_s: float = 0.0) -> float:
    """The time at which the engine has nothing left to do."""
    while (ends_s := engine.step(now_s).ends_s) is not None:
        now_s = ends_s
    return now_s


def common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


# By hand.


def test_the_first_token_of_an_idle_engine_takes_the_models_prefill_time() -> None:
    engine = new_engine(costs=load_profile("a6000-mistral-7b").cost_model())
    engine.add(new_call(engine, range(1_000), 2))
    step = engine.step(5.0)
    assert step.outputs == ()
    # (0.10842571 ms x 1000 + 4.2098 ms of forward pass, 1.86e-4 ms x 1000 + 0.159 ms of attention) / 0.9
    assert step.ends_s == pytest.approx(5.0 + (108.42571 + 4.2098 + 0.186 + 0.159) / 0.9 / 1e3)
    assert step.ends_s is not None
    second = engine.step(step.ends_s)
    assert [(output.token, output.finished) for output in second.outputs] == [(0, False)]


def test_a_prompt_beyond_the_budget_is_computed_in_chunks_and_decodes_go_first() -> None:
    run = drive([Spec(0, 0, 0, 1, 5), Spec(1, 0, 192, 8, 1)], max_batch_tokens=101, ahead=0)
    assert run.recorder.batches == [[(1, 0)], [(1, 1), (100, 0)], [(1, 2), (100, 100)], [(1, 3)], [(1, 4)]]


def test_a_call_that_comes_during_an_iteration_waits_for_the_next_one_too() -> None:
    """The next iteration was planned when the one in flight began."""
    run = drive([Spec(0, 0, 0, 1, 5), Spec(1, 0, 192, 8, 1)], max_batch_tokens=101)
    assert run.recorder.batches == [[(1, 0)], [(1, 1)], [(1, 2), (100, 0)], [(1, 3), (100, 100)], [(1, 4)]]


@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (None, 3)])
def test_a_call_that_ends_before_its_limit_has_a_place_that_is_wasted(limit: int | None, batches: int) -> None:
    recorder = Recorder()
    engine = new_engine(costs=recorder)
    call = new_call(engine, range(8), 2)
    call.max_output_tokens = limit
    engine.add(call)
    run_until_idle(engine)
    assert len(recorder.batches) == batches
    assert (call.sent_tokens, call.output_tokens) == (2, 2)


def test_a_call_that_is_ended_has_the_tokens_that_were_sent() -> None:
    """A stop string ends it while further tokens are planned. The scheduler learns from the lengths of outputs."""
    engine = new_engine()
    call = new_call(engine, range(8), 9)
    engine.add(call)
    ends_s = engine.step(0.0).ends_s
    assert ends_s is not None
    engine.step(ends_s)
    assert (call.sent_tokens, call.output_tokens) == (1, 3), "one is computed, and the next is planned"
    assert engine.remove(call)
    assert (call.sent_tokens, call.output_tokens) == (1, 1)


def test_a_call_may_end_while_it_waits_after_a_preemption() -> None:
    """Its last token was in flight when the plan for the next iteration preempted it."""
    engine = new_engine()
    call = new_call(engine, range(8), 1)
    call.max_output_tokens = None
    engine._scheduler = PreemptsAll()
    engine.add(call)
    first = engine.step(0.0)
    assert engine.waiting == [call]
    assert first.ends_s is not None
    [output] = engine.step(first.ends_s).outputs
    assert output.finished
    assert engine.waiting == engine.running == []


def test_a_call_finds_what_one_picked_just_before_it_is_about_to_compute() -> None:
    run = drive([Spec(0, 1, 192, 1, 1), Spec(0, 1, 192, 7, 1)])
    assert run.recorder.batches == [[(193, 0), (7, 192)]]
    assert [call.cached_tokens for call in run.calls] == [0, 192]


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = new_engine()
    for expected in (0, 48):
        call = new_call(engine, range(64), 1)
        engine.add(call)
        run_until_idle(engine)
        assert call.cached_tokens == expected


def test_a_step_before_the_end_of_an_iteration_changes_nothing() -> None:
    engine = new_engine()
    engine.add(new_call(engine, range(8), 1))
    ends_s = engine.step(1.0).ends_s
    assert ends_s is not None
    assert engine.step((1.0 + ends_s) / 2) == engine.step(1.0)
    assert engine.counters.iterations == 1
    assert [output.finished for output in engine.step(ends_s).outputs] == [True]


def test_output_is_found_by_the_next_turn() -> None:
    engine = new_engine()
    engine.add(new_call(engine, range(60), 10))
    run_until_idle(engine)
    follow_up = new_call(engine, [*range(60), *[0] * 10, 7, 7, 7], 1)
    engine.add(follow_up)
    run_until_idle(engine)
    assert follow_up.cached_tokens == 64


def test_a_preempted_call_reports_what_its_first_admission_found() -> None:
    run = drive([Spec(0, 0, 64, 64, 60), Spec(0, 1, 64, 48, 60)], kv_tokens=256)
    assert run.engine.counters.preemptions > 0
    assert [call.cached_tokens for call in run.calls] == [0, 0]


def test_aborting_frees_the_blocks_at_once_and_twice_is_once() -> None:
    engine = new_engine(kv_tokens=160)
    call = new_call(engine, range(40), 5)
    engine.add(call)
    engine.step(0.0)
    assert engine.cache_state().kv == KvState(10, 7, 0)
    engine.abort(call)
    engine.abort(call)
    assert engine.cache_state().kv == KvState(10, 8, 2), "whole blocks stay findable"
    assert engine.counters.aborted_calls == 1
    assert engine.step(99.0).outputs == ()


def test_a_report_names_queue_times_and_tree_blocks() -> None:
    engine = new_engine(max_running_calls=1)
    first, second = new_call(engine, range(128), 3), new_call(engine, range(500, 570), 1, now_s=0.0)
    engine.add(first)
    engine.add(second)
    ends_s = engine.step(0.5).ends_s
    assert ends_s is not None
    state = engine.cache_state()
    assert (state.block_tokens, state.granularity_tokens, state.snapshot) == (16, 64, True)
    assert state.stored == [StoredRun(None, list(first.tree_chain.hashes))]
    assert (state.queue.waiting, state.queue.running, state.queue.waiting_tokens) == (1, 1, 70)
    assert state.scheduler.slots == 1
    assert state.queue.mean_queue_s == 0.5
    assert state.iteration.mean_s == state.iteration.max_s == pytest.approx(ends_s - 0.5)
    assert state.iteration.mean_chunk_tokens == 128
    assert engine.cache_state(state.cursor).stored == []


def test_what_cannot_ever_run_does_not_fit() -> None:
    engine = new_engine(kv_tokens=170)  # ten blocks of 16 and a rest that is none
    assert engine.fits(150, 10)
    assert not engine.fits(150, 11)
