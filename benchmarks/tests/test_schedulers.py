"""The systems of the comparison on the real engine core: what they may not exceed, and what is theirs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.mixed_prompts import MAX_OUTPUT_TOKENS, Lengths, MixedCall
from benchmarks.schedulers.baselines import ORCA_CALLS, FastGen, Orca, SmallerBudget
from benchmarks.schedulers.clairvoyant import Clairvoyant, Foresight, least_kv_time, shortest_remaining
from benchmarks.schedulers.engine_run import BLOCK_TOKENS, CallRecord, embedded_call, run
from benchmarks.schedulers.systems import Machine, systems
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.in_order import Fcfs
from plait.policy.scheduling.plan import EngineFacts, LocalCall, LocalScheduler, Plan
from plait.policy.types import Slo

KV_TOKENS = 12_800
COSTS = CostModel(PiecewiseLinear(((1, 0.01),), 0.0001), 0.0, 1e-6, 0.0, LongAttention())
MACHINE = Machine(COSTS, KV_TOKENS)


def a_call(number: int, arrives_s: float, prompt_tokens: int, output_tokens: int = 20) -> MixedCall:
    slo = Slo(ttft_s=0.02 + prompt_tokens * 0.00012, tpot_s=0.1)
    return MixedCall(
        number, arrives_s, Lengths(prompt_tokens, output_tokens), prompt_tokens > 1_000, slo, feasible=True
    )


CROWD = [a_call(number, number * 0.05, (100, 3_000, 400, 9_000, 40, 1_500)[number % 6]) for number in range(60)]


class Watched:
    """Checks every plan of `scheduler` against the facts that it was made from."""

    def __init__(self, scheduler: LocalScheduler) -> None:
        self.plans: list[Plan] = []
        self.most_running = 0
        self._scheduler = scheduler

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        plan = self._scheduler.plan(now_s, waiting, running, facts)
        freed = sum(facts.blocks_freed(call) for call in plan.preempt)
        needed = sum(facts.blocks_needed(call, tokens) for call, tokens in plan.picks)
        assert needed <= facts.free_blocks + freed
        assert sum(tokens for _, tokens in plan.picks) <= facts.max_batch_tokens
        picked = [call for call, _ in plan.picks]
        assert len(set(picked)) == len(picked)
        assert not set(picked) & set(plan.preempt)
        assert all(tokens > 0 for _, tokens in plan.picks)
        after = (set(running) - set(plan.preempt)) | set(picked)
        assert len(after) <= facts.max_running_calls
        self.most_running = max(self.most_running, len(after))
        self.plans.append(plan)
        return plan


def serve(scheduler: LocalScheduler, calls: Sequence[MixedCall], max_batch_tokens: int = 2_048) -> list[CallRecord]:
    return run(scheduler, calls, COSTS, kv_tokens=KV_TOKENS, max_batch_tokens=max_batch_tokens).records


@pytest.mark.parametrize("name", systems())
def test_every_system_serves_everyone_within_budget_blocks_and_seats(name: str) -> None:
    system = systems()[name]
    records = serve(Watched(system.build(MACHINE)), CROWD, system.max_batch_tokens(MACHINE))
    for record in records:
        assert record.call.arrives_s < record.first_token_s <= record.finished_s


@pytest.mark.parametrize("name", systems())
def test_the_same_calls_are_served_the_same_way(name: str) -> None:
    system = systems()[name]
    first, second = (serve(system.build(MACHINE), CROWD, system.max_batch_tokens(MACHINE)) for _ in range(2))
    assert first == second


def test_a_smaller_budget_holds_in_every_iteration() -> None:
    watched = Watched(SmallerBudget(Fcfs(), 256))
    serve(watched, CROWD)
    assert max(sum(tokens for _, tokens in plan.picks) for plan in watched.plans) == 256


def test_orca_runs_eight_calls_at_most_and_no_prompt_is_cut() -> None:
    watched = Watched(Orca(KV_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS))
    calls = [a_call(number, 0.0, 64 + number) for number in range(20)]
    serve(watched, calls, max_batch_tokens=KV_TOKENS)
    # 66 blocks are reserved for the first, 67 for the others: five fit into 400.
    assert watched.most_running == 5 < ORCA_CALLS
    first_picks = {call: tokens for plan in reversed(watched.plans) for call, tokens in plan.picks}
    assert all(tokens == call.prompt_tokens for call, tokens in first_picks.items())


def test_orcas_seats_bind_where_its_reservations_do_not() -> None:
    watched = Watched(Orca(10 * KV_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS))
    serve(watched, [a_call(number, 0.0, 64) for number in range(20)], max_batch_tokens=KV_TOKENS)
    assert watched.most_running == ORCA_CALLS


def test_orca_reserves_the_prompt_and_the_longest_output() -> None:
    orca = Orca(400, 32)
    assert orca.reserved_blocks(LocalCall("a", 0.0, 32)) == 1 + MAX_OUTPUT_TOKENS // 32
    assert orca.reserved_blocks(LocalCall("b", 0.0, 33)) == 2 + MAX_OUTPUT_TOKENS // 32
    assert orca.reserved_blocks(LocalCall("c", 0.0, 12_000)) == 400
    assert Orca(400, 32, 8_192).reserved_blocks(LocalCall("d", 0.0, 32)) == 256
    assert Orca(400, 32, 8_192).reserved_blocks(LocalCall("e", 0.0, 8_192)) == 320


def test_fastgen_fills_its_forward_size_exactly_while_prompts_wait() -> None:
    watched = Watched(FastGen(512))
    serve(watched, [a_call(number, 0.0, 700) for number in range(8)])
    sizes = [sum(tokens for _, tokens in plan.picks) for plan in watched.plans]
    assert sizes[:10] == [512] * 10
    assert max(sizes) == 512


def test_fastgen_resets_when_no_decode_finds_a_block() -> None:
    # Both prompts fit together, both outputs do not.
    watched = Watched(FastGen(2_048))
    calls = [a_call(0, 0.0, 6_300, 1_000), a_call(1, 0.0, 6_300, 1_000)]
    records = serve(watched, calls)
    assert any(plan.preempt for plan in watched.plans)
    assert records[0].finished_s < records[1].finished_s


def foresight() -> Foresight:
    return Foresight(COSTS, KV_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS)


def test_with_foresight_nothing_is_ever_preempted_for_lack_of_blocks() -> None:
    watched = Watched(Clairvoyant(foresight(), shortest_remaining, triage=False))
    serve(watched, CROWD)
    assert not any(plan.preempt for plan in watched.plans)


def test_the_shortest_goes_first() -> None:
    scheduler = Clairvoyant(foresight(), shortest_remaining, triage=False)
    records = serve(scheduler, [a_call(0, 0.0, 8_000), a_call(1, 0.0, 100), a_call(2, 0.0, 7_000)])
    assert [record.call.number for record in sorted(records, key=lambda record: record.finished_s)] == [1, 2, 0]


def test_a_call_that_can_be_kept_goes_before_a_lost_one() -> None:
    hopeless = MixedCall(0, 0.0, Lengths(9_000, 400), True, Slo(ttft_s=0.1, tpot_s=0.1), feasible=False)
    arrives_late = a_call(1, 0.5, 6_000)
    records = serve(Clairvoyant(foresight(), least_kv_time), [hopeless, arrives_late])
    assert records[1].met
    assert not records[0].met


def test_the_peak_counts_who_still_holds_blocks_when_another_ends() -> None:
    short = embedded_call(a_call(0, 0.0, 32, 32))
    long = embedded_call(a_call(1, 0.0, 64, 96))
    # At the end of the short call: 64 and 96 tokens, 2 + 3 blocks; at the end of the long one 160 tokens, 5 blocks.
    assert foresight().peak_blocks([short, long]) == 5
    assert foresight().peak_blocks([short, short, long]) == 7
