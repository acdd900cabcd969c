"""Facts of an engine: a call owns what it computed, and finds `cached` at admission.

Calls share the blocks at the beginning of equal `contents`, which a test may give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from hypothesis import strategies as st

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.chunking import NO_TIMES, Budget
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.moment import Moment, SloSettings
from plait.policy.scheduling.outputs import RecentOutputs
from plait.policy.scheduling.pace import Pace, PreemptionHistory, RecentIterations
from plait.policy.scheduling.plan import InFlight, LocalCall, LocalScheduler, Plan
from plait.policy.scheduling.slo import Objectives
from plait.policy.scheduling.slo_scheduler import SloScheduler
from plait.policy.types import Slo

BLOCK_TOKENS = 4

COSTS = CostModel(PiecewiseLinear(((0, 0.01),), 1e-4), 0.0, 0.0, 0.0, LongAttention())
"""An iteration of n tokens takes 10 ms + 0.1 ms n; its pivot is at 900 tokens and 0.1 s."""


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass
class FakeEngine:
    max_batch_tokens: int = 1000
    max_running_calls: int = 10
    free_blocks: int = 10_000
    cached: dict[str, int] = field(default_factory=dict)
    waiting: list[LocalCall] = field(default_factory=list)
    running: list[LocalCall] = field(default_factory=list)
    looked_up: int = 0
    loading: set[LocalCall] = field(default_factory=set)
    shares_in_iteration: bool = True
    contents: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    in_flight: InFlight | None = None

    def cached_tokens(self, call: LocalCall) -> int:
        self.looked_up += 1
        return self.cached.get(call.call_id, 0)

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        self.looked_up += 1
        if call in self.running:
            return blocks(call.computed_tokens + new_tokens) - blocks(call.computed_tokens)
        return blocks(self.cached.get(call.call_id, 0) + new_tokens)

    def blocks_freed(self, call: LocalCall) -> int:
        return blocks(call.computed_tokens)

    def stored_tokens(self, call: LocalCall) -> int:
        return self.stored.get(call.call_id, call.computed_tokens)

    def block_key(self, call: LocalCall, tokens: int) -> tuple[int, ...] | None:
        self.looked_up += 1
        end, content = (tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS, self.contents.get(call.call_id, ())
        return content[:end] if end <= len(content) else None

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        pairs = zip(self.contents[call.call_id][:-1], self.contents[other.call_id], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return shared // BLOCK_TOKENS * BLOCK_TOKENS

    def plan(self, scheduler: LocalScheduler, now_s: float = 0.0) -> Plan:
        return scheduler.plan(now_s, self.waiting, self.running, self)


def slo_scheduler(settings: SloSettings | None = None, costs: CostModel | None = COSTS) -> SloScheduler:
    scheduler = SloScheduler(settings)
    if costs is not None:
        scheduler.expect(costs)
    return scheduler


def moment(engine: FakeEngine) -> Moment:
    """The engine idle at 0 s, nothing known of its iteration times."""
    history = PreemptionHistory()
    return Moment(
        now_s=0.0,
        waiting=engine.waiting,
        decodes=(),
        prefills=(),
        facts=engine,
        settings=SloSettings(),
        objectives=Objectives(),
        pace=Pace.of(RecentIterations(), IterationModel(), history, RecentOutputs(), engine.max_batch_tokens),
        preemptions=history,
        long_calls=(),
        empty_budget=Budget(engine.max_batch_tokens, NO_TIMES),
        may_pause=False,
        arrivals_slack_s=None,
    )


def prompt(name: str, tokens: int, ttft_s: float | None = None, arrived_s: float = 0.0) -> LocalCall:
    return LocalCall(name, arrived_s, tokens, slo=None if ttft_s is None else Slo(ttft_s=ttft_s))


def decode(name: str, tokens: int = 100, output: int = 1, slo: Slo | None = None) -> LocalCall:
    return LocalCall(name, 0.0, tokens, tokens + output - 1, output, slo=slo)


def names(plan: Plan) -> list[tuple[str, int]]:
    return [(call.call_id, tokens) for call, tokens in plan.picks]


slos = st.none() | st.builds(
    Slo,
    ttft_s=st.none() | st.floats(0.001, 5.0),
    tpot_s=st.none() | st.floats(0.001, 0.3),
    jct_s=st.none() | st.floats(0.1, 60.0),
)
limits = st.none() | st.integers(5, 500)


@st.composite
def engines(draw: st.DrawFn) -> FakeEngine:
    engine = FakeEngine(
        max_batch_tokens=draw(st.integers(1, 60)),
        max_running_calls=draw(st.integers(1, 6)),
        free_blocks=draw(st.integers(0, 20)),
    )
    for number in range(draw(st.integers(0, engine.max_running_calls))):
        size, output = draw(st.integers(1, 40)), draw(st.integers(0, 5))
        computed = draw(st.integers(0, size - 1)) if output == 0 else size + output - 1
        call = LocalCall(f"running-{number}", draw(st.floats(0, 3)), size, computed, output, draw(slos))
        call.max_output_tokens = draw(limits)
        engine.running.append(call)
    for number in range(draw(st.integers(0, 6))):
        call = LocalCall(
            f"waiting-{number}", draw(st.floats(0, 3)), draw(st.integers(1, 40)), 0, draw(st.integers(0, 2))
        )
        call.slo, call.priority, call.max_output_tokens = draw(slos), draw(st.integers(-1, 1)), draw(limits)
        engine.cached[call.call_id] = draw(st.integers(0, blocks(call.uncomputed_tokens) - 1)) * BLOCK_TOKENS
        engine.waiting.append(call)
    return engine


def check_plan(engine: FakeEngine, plan: Plan) -> None:
    """Assert what holds for every plan: it stays within the budget, the blocks and the sequence slots."""
    freed = sum(engine.blocks_freed(call) for call in plan.preempt)
    used = sum(tokens for _, tokens in plan.picks)
    assert used <= engine.max_batch_tokens
    assert plan.budget_tokens is None or used <= plan.budget_tokens <= engine.max_batch_tokens
    assert sum(engine.blocks_needed(call, tokens) for call, tokens in plan.picks) <= engine.free_blocks + freed
    assert all(0 < tokens <= call.uncomputed_tokens - engine.cached_tokens(call) for call, tokens in plan.picks)
    admitted = [call for call, _ in plan.picks if call in engine.waiting]
    assert len(engine.running) - len(plan.preempt) + len(admitted) <= engine.max_running_calls
    named = [*plan.preempt, *(call for call, _ in plan.picks), *plan.backfill]
    assert len({id(call) for call in named}) == len(named)
    assert set(plan.preempt) <= set(engine.running)
