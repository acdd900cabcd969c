"""A local scheduler's input and output: the calls of one engine, the engine's facts, and a plan.

Every engine adapter drives a `LocalScheduler` with `plan`, once an iteration.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from plait.policy.costs.cost_model import CostModel
from plait.policy.types import Objective, Slo


class IterationWork(NamedTuple):
    """Sums over the calls of an iteration. A call with one new token is a decode, one with more computes a chunk."""

    new_tokens: int = 0
    sequence_tokens: int = 0
    """New and context tokens."""
    decodes: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    """The new and context tokens of each chunk."""

    @classmethod
    def of(cls, new_tokens: Collection[int], context_tokens: Collection[int]) -> IterationWork:
        """The work of calls, given as the new tokens and the context tokens of each."""
        chunks = tuple((new, context) for new, context in zip(new_tokens, context_tokens, strict=True) if new > 1)
        total = sum(new_tokens)
        return cls(
            new_tokens=total,
            sequence_tokens=total + sum(context_tokens),
            decodes=len(new_tokens) - len(chunks),
            chunks=chunks,
        )


class InFlight(NamedTuple):
    """An iteration that the engine computes while the next one is planned."""

    work: IterationWork
    began_s: float


RECENT_ITERATIONS = 128
"""How many of the latest iterations count for AccelGen's T_max (the longest iteration) and L_c (the mean chunk), and
for an engine's reports about its iterations (docs/design/local-scheduler.md).
"""


@dataclass(slots=True, eq=False)
class LocalCall:
    """A call inside an engine."""

    call_id: str
    arrived_s: float
    """Zero on the engine's clock: the arrival there, less the time that the call waited before."""
    prompt_tokens: int
    computed_tokens: int = 0
    """The leading tokens, prompt then output, whose KV is in the cache."""
    output_tokens: int = 0
    """Tokens that the iteration in flight computes count."""
    slo: Slo | None = None
    objective: Objective | None = None
    priority: int = 0
    """Among equal calls, the lower goes first."""
    max_output_tokens: int | None = None
    """None: not known."""
    is_line: bool = False
    """A line of a batch, for which nobody waits."""

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens to compute before the next output token: the rest of the prompt, or the last output token."""
        return self.prompt_tokens + self.output_tokens - self.computed_tokens


class EngineFacts(Protocol):
    """The engine's state that a plan depends on."""

    @property
    def max_batch_tokens(self) -> int:
        """The most new tokens that one iteration may compute."""

    @property
    def max_running_calls(self) -> int:
        """The most calls that may run at once."""

    @property
    def in_flight(self) -> InFlight | None:
        """The iteration that is computed now, after which the planned one begins; None: the planned one begins at once.

        Engines that do not plan ahead never have one.
        """

    @property
    def free_blocks(self) -> int:
        """KV blocks that no running call uses. Cached blocks count, since they can be evicted."""

    def cached_tokens(self, call: LocalCall) -> int:
        """Tokens of a waiting call's prompt that are in the cache now."""

    def blocks_needed(self, call: LocalCall, new_tokens: int) -> int:
        """Free blocks that `new_tokens` more of a call take, including cached blocks that can then not be evicted."""

    def blocks_freed(self, call: LocalCall) -> int:
        """Blocks that preempting a running call would free."""

    @property
    def loading(self) -> Collection[LocalCall]:
        """Waiting calls whose blocks are being loaded from lower tiers. They take no tokens and delay no other call."""

    @property
    def shares_in_iteration(self) -> bool:
        """Whether a call can use blocks that an earlier pick of the same iteration computes."""

    def stored_tokens(self, call: LocalCall) -> int:
        """Tokens of a running call in whole blocks that other calls can find in the cache."""

    def block_key(self, call: LocalCall, tokens: int) -> Hashable | None:
        """The key of the block with the call's token at index `tokens`, from 0; None if this block is not whole.

        Two blocks have equal keys if calls can share them: all tokens up to their ends are equal.
        """

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        """Tokens that a waiting call could take from the other call's blocks, except the waiting call's last token."""


def ready(waiting: Sequence[LocalCall], facts: EngineFacts) -> Sequence[LocalCall]:
    loading = facts.loading
    return [call for call in waiting if call not in loading] if loading else waiting


@dataclass(frozen=True, slots=True)
class Plan:
    """The intent for one iteration. A call that is neither picked nor in the backfill gets no tokens."""

    preempt: tuple[LocalCall, ...]
    picks: tuple[tuple[LocalCall, int], ...]
    """(call, most tokens to compute), in order. The call that uses up the budget may get more, if others leave tokens.
    """
    backfill: tuple[LocalCall, ...] = ()
    """Calls that may take the rest of the budget, in order: some engines know only on admission what a call needs."""
    budget_tokens: int | None = None
    """A limit below the engine's own maximum."""


@runtime_checkable
class LocalScheduler(Protocol):
    """Plans an engine's iterations, deterministically: the same history of arguments gives the same plan.

    Planning the same iteration twice changes nothing.
    """

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The next iteration's plan; it never exceeds the budget, the free blocks or the free sequence slots.

        `waiting` and `running` are in the order of arrival. Every running call has something to compute.
        """


@runtime_checkable
class MeasuringScheduler(Protocol):
    """A local scheduler that plans by how long iterations take. Adapters call these methods if they exist."""

    def expect(self, costs: CostModel) -> None:
        """Use this model of the engine's iteration times. Adapters call it before the first plan."""

    def observe(self, duration_s: float, work: IterationWork) -> None:
        """An iteration is over; `work` is what it computed."""
