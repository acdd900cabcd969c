"""One engine core in virtual time: calls arrive, iterations follow each other, and what became of each call is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from time import thread_time_ns

from benchmarks.mixed_prompts import MixedCall
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.policy.costs.cost_model import CostModel
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, root_hash
from plait.policy.scheduling.plan import EngineFacts, IterationWork, LocalCall, LocalScheduler, MeasuringScheduler, Plan
from plait.policy.types import NO_SLO

MODEL = "opt-13b"
BLOCK_TOKENS = 32
"""AccelGen, section 3.1."""
MAX_CALL_TOKENS = 1 << 15
"""Token ids that a call may use up: no two calls share a prefix."""


@dataclass(slots=True)
class CallRecord:
    """What became of a call; `iterations_met` counts its first token within TTFT and later ones within TPOT."""

    call: MixedCall
    first_token_s: float = 0.0
    finished_s: float = 0.0
    iterations_met: int = 0
    last_token_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.call.arrives_s

    @property
    def jct_s(self) -> float:
        """Arrival to last token."""
        return self.finished_s - self.call.arrives_s

    @property
    def tpot_s(self) -> float:
        """Mean gap between tokens; 0 for a single one."""
        return (self.finished_s - self.first_token_s) / max(1, self.call.lengths.output_tokens - 1)

    @property
    def met(self) -> bool:
        """Both objectives."""
        ttft_s, tpot_s = _limits_s(self.call)
        return self.ttft_s <= ttft_s + ROUNDING_S and self.tpot_s <= tpot_s + ROUNDING_S

    @property
    def jct_met(self) -> bool:
        """The job as a whole in the time that both objectives leave it."""
        ttft_s, tpot_s = _limits_s(self.call)
        return self.jct_s <= ttft_s + tpot_s * (self.call.lengths.output_tokens - 1) + ROUNDING_S

    def token(self, now_s: float) -> None:
        """One more output token."""
        ttft_s, tpot_s = _limits_s(self.call)
        if not self.first_token_s:
            self.first_token_s = now_s
            limit_s, since_s = ttft_s, self.call.arrives_s
        else:
            limit_s, since_s = tpot_s, self.last_token_s
        self.iterations_met += now_s - since_s <= limit_s + ROUNDING_S
        self.last_token_s = now_s


def _limits_s(call: MixedCall) -> tuple[float, float]:
    """TTFT and TPOT; infinite if they are not promised."""
    slo = call.slo
    return inf if slo.ttft_s is None else slo.ttft_s, inf if slo.tpot_s is None else slo.tpot_s


ROUNDING_S = 1e-9


@dataclass(slots=True)
class Iterations:
    """Sums over a run's iterations; times in seconds, utilisations weighted by time where they say so."""

    count: int = 0
    busy_s: float = 0.0
    forward_tokens: int = 0
    full_forwards: float = 0.0
    """Sum of forward size over the pivot forward size, at most 1 each."""
    kv_share_s: float = 0.0
    """Used share of the KV cache times seconds."""
    preemptions: int = 0
    decisions_ns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """A finished run: every call has ended. Times and tokens of outputs are kept for windows."""

    records: list[CallRecord]
    iterations: Iterations
    output_times_s: list[float]


class Timed:
    """`scheduler`, with the CPU time of each of its decisions, which includes what it learns of iterations."""

    def __init__(self, scheduler: LocalScheduler) -> None:
        self.decisions_ns: list[int] = []
        self._scheduler = scheduler
        self._measuring = scheduler if isinstance(scheduler, MeasuringScheduler) else None
        self._observed_ns = 0

    def expect(self, costs: CostModel) -> None:
        """Pass the engine's model on."""
        if self._measuring is not None:
            self._measuring.expect(costs)

    def observe(self, duration_s: float, work: IterationWork) -> None:
        """Pass an iteration's time on."""
        started_ns = thread_time_ns()
        if self._measuring is not None:
            self._measuring.observe(duration_s, work)
        self._observed_ns += thread_time_ns() - started_ns

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The scheduler's own plan."""
        started_ns = thread_time_ns()
        plan = self._scheduler.plan(now_s, waiting, running, facts)
        if waiting or running:  # an idle engine asks too
            self.decisions_ns.append(thread_time_ns() - started_ns + self._observed_ns)
            self._observed_ns = 0
        return plan


def run(
    scheduler: LocalScheduler,
    calls: Sequence[MixedCall],
    cost_model: CostModel,
    *,
    kv_tokens: int,
    max_batch_tokens: int,
    ahead: int = 1,
    jitter: float = 0.0,
    seed: int = 0,
) -> Run:
    """Serve `calls` (in the order of arrival) to the last one. RuntimeError if the scheduler leaves calls waiting.

    `ahead`, `jitter` and its `seed` are the engine's settings.
    """
    timed = Timed(scheduler)
    settings = EngineSettings(
        name="engine", model=MODEL, kv_tokens=kv_tokens, block_tokens=BLOCK_TOKENS, max_batch_tokens=max_batch_tokens,
        ahead=ahead, jitter=jitter, seed=seed,
    )  # fmt: skip
    engine = Engine(settings, cost_model, scheduler=timed)
    pivot = cost_model.pivot()
    assert pivot is not None
    records = {call.number: CallRecord(call) for call in calls}
    result = Run(list(records.values()), Iterations(), [])
    total_blocks, queue, now_s, unfinished = kv_tokens // BLOCK_TOKENS, list(reversed(calls)), 0.0, len(calls)
    while unfinished:
        while queue and queue[-1].arrives_s <= now_s:
            engine.add(embedded_call(queue.pop()))
        step = engine.step(now_s)
        for output in step.outputs:
            records[int(output.call.call_id)].token(now_s)
            result.output_times_s.append(now_s)
            if output.finished:
                records[int(output.call.call_id)].finished_s = now_s
                unfinished -= 1
        if step.ends_s is not None:
            in_flight = engine.facts.in_flight
            assert in_flight is not None
            used = 1 - engine.facts.free_blocks / total_blocks
            _account(result.iterations, step.ends_s - now_s, in_flight.work.new_tokens, pivot.tokens, used)
            now_s = step.ends_s
        elif queue:
            now_s = queue[-1].arrives_s
        elif unfinished:
            raise RuntimeError(f"{unfinished} calls are left waiting with nothing running")
    result.iterations.preemptions = engine.counters.preemptions
    result.iterations.decisions_ns = timed.decisions_ns
    return result


def embedded_call(call: MixedCall) -> EmbeddedCall:
    """The call as the engine takes it; its tokens are its own, so that nothing but its own blocks is found cached."""
    tokens = range(call.number * MAX_CALL_TOKENS, call.number * MAX_CALL_TOKENS + call.lengths.prompt_tokens)
    assert len(tokens) + call.lengths.output_tokens <= MAX_CALL_TOKENS
    root = root_hash(MODEL)
    return EmbeddedCall(
        str(call.number),
        call.arrives_s,
        call.lengths.prompt_tokens,
        slo=call.slo if call.slo != NO_SLO else None,
        chain=HashChain(BLOCK_TOKENS, root, tokens),
        tree_chain=HashChain(TREE_BLOCK_TOKENS, root, tokens),
        final_output_tokens=call.lengths.output_tokens,
        output=count(tokens.stop),
    )


def _account(sums: Iterations, duration_s: float, forward_tokens: int, pivot_tokens: int, used_share: float) -> None:
    sums.count += 1
    sums.busy_s += duration_s
    sums.forward_tokens += forward_tokens
    sums.full_forwards += min(1.0, forward_tokens / pivot_tokens)
    sums.kv_share_s += used_share * duration_s
