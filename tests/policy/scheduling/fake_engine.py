"""Facts of an engine whose calls share no blocks: a call owns what it computed, and finds `cached` at admission."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.chunking import EngineBudget
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.moment import Moment
from plait.policy.scheduling.outputs import MeanOutputs
from plait.policy.scheduling.pace import Pace, RecentIterations
from plait.policy.scheduling.plan import LocalCall, LocalScheduler, Plan
from plait.policy.scheduling.preemption_history import PreemptionHistory
from plait.policy.scheduling.slo import Objectives
from plait.policy.scheduling.slo_scheduler import SloScheduler
from plait.policy.scheduling.slo_settings import SloSettings
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
        pace=Pace.of(RecentIterations(), IterationModel(), history, MeanOutputs(), engine.max_batch_tokens),
        preemptions=history,
        long_calls=(),
        empty_budget=EngineBudget(engine.max_batch_tokens),
        may_pause=False,
        arrivals_slack_s=None,
    )


def prompt(name: str, tokens: int, ttft_s: float | None = None, arrived_s: float = 0.0) -> LocalCall:
    return LocalCall(name, arrived_s, tokens, slo=None if ttft_s is None else Slo(ttft_s=ttft_s))


def decode(name: str, tokens: int = 100, output: int = 1, slo: Slo | None = None) -> LocalCall:
    return LocalCall(name, 0.0, tokens, tokens + output - 1, output, slo=slo)


def names(plan: Plan) -> list[tuple[str, int]]:
    return [(call.call_id, tokens) for call, tokens in plan.picks]
