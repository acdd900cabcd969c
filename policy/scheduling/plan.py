"""What a local scheduler is asked and what it answers: the calls of one engine, the engine's facts, and a plan.

Every engine adapter drives a `LocalScheduler` with `plan`, once an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from plait.policy.cost_model import CostModel
from plait.policy.types import Objective, Slo

RECENT_ITERATIONS = 128
"""What an engine has lately been doing is taken over these: T_max, L_c, and what it reports of itself
(docs/design/local-scheduler.md).
"""


@dataclass(slots=True, eq=False)
class LocalCall:
    """A call inside an engine. `computed_tokens` have their KV in the cache: of the prompt, then of the output.

    `arrived_s` is the call's zero on the engine's clock: its arrival less the time it had waited before. The rest is
    what it was annotated with; a lower `priority` goes first among equals.
    """

    call_id: str
    arrived_s: float
    prompt_tokens: int
    computed_tokens: int = 0
    output_tokens: int = 0
    slo: Slo | None = None
    objective: Objective | None = None
    priority: int = 0

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens to compute before the next output token: what is left of the prompt, or the last output token."""
        return self.prompt_tokens + self.output_tokens - self.computed_tokens


class EngineFacts(Protocol):
    """What the engine knows and the plan depends on."""

    @property
    def max_batch_tokens(self) -> int:
        """The most new tokens one iteration may compute."""

    @property
    def max_running_calls(self) -> int:
        """The most calls that may run at once."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that no running call uses; cached ones count, since they can be evicted."""

    def cached_tokens(self, call: LocalCall) -> int:
        """Tokens of a waiting call's prompt that are in the cache now."""

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        """Free blocks that computing `new_tokens` more of a call takes, cached ones it would pin included."""

    def blocks_freed(self, call: LocalCall) -> int:
        """Blocks that preempting a running call would set free."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Intent for one iteration, in order: calls to preempt first, then (call, tokens to compute) picks.

    A pick orders the calls and cuts a prompt: `tokens` is the most that the call gets, but for the one that uses the
    budget up, which may have what others leave. `backfill` names the calls, in their order, that may take what the
    picks leave of the budget, for engines that find out only on admission how much a call needs. A call that is in
    neither is held back: it gets nothing. `budget_tokens` limits the iteration below the engine's own maximum.
    """

    preempt: tuple[LocalCall, ...]
    picks: tuple[tuple[LocalCall, int], ...]
    backfill: tuple[LocalCall, ...] = ()
    budget_tokens: int | None = None


class LocalScheduler(Protocol):
    """Deterministic: the same history of arguments gives the same plan, and asking twice changes nothing."""

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The next iteration's plan; never beyond the budget, the free blocks or the running limit.

        `waiting` and `running` are in the order of arrival, and every running call has something to compute.
        """


@runtime_checkable
class MeasuringScheduler(Protocol):
    """A local scheduler that plans by how long iterations take: an adapter that finds these methods calls them."""

    def expect(self, costs: CostModel) -> None:
        """Before the first plan, where the engine has a fitted model of its iterations."""

    def observe(self, duration_s: float, work: Sequence[tuple[int, int]]) -> None:
        """An iteration is over; `work` is (new tokens, context tokens) of each of its calls."""
