"""A call of a workload in the simulator, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from plait.policy.prefix.block_hash import HashChain
from plait.policy.types import Objective, PlacementReason, Slo, TaskGroup


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt that many calls may share: its chains are copied, never changed."""

    tokens: int
    chain: HashChain
    tree_chain: HashChain


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One call of a workload. It generates exactly `output_tokens`, with the ids from `first_output_id` on.

    If `first_output_id` is None, the ids are unique, so that the output fills the cache but never matches. The times of
    `slo` count from `arrives_s`. `objective` and `group` are as in `Call`. Its client names the `session`, if any.
    """

    arrives_s: float
    prompt: Prompt
    output_tokens: int
    prefix: str = ""
    slo: Slo | None = None
    objective: Objective | None = None
    group: TaskGroup | None = None
    first_output_id: int | None = None
    tenant: str = ""
    session: str = ""


@dataclass(slots=True)
class CallRecord:
    """A call's result. Times are in seconds since the start. `cached_tokens` is the engine's own count.

    `sent_s` is when the engine was sent the call, and `admitted_s` when it first began to compute it. Until then the
    call has no engine. A call that was refused was told to come again after `retry_after_s`, at its `finished_s`.
    """

    prefix: str
    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    tenant: str = ""
    engine_id: str = ""
    reason: PlacementReason = PlacementReason.EXPLORE
    predicted_cached_tokens: int = 0
    sent_s: float = 0.0
    cached_tokens: int = 0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    admitted_s: float = 0.0
    retry_after_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        """Arrival to last token."""
        return self.finished_s - self.arrived_s

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not in the cache."""
        return self.prompt_tokens - self.cached_tokens
