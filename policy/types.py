"""The values the policies speak in: a call, what it was promised, and where it was placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Objective(StrEnum):
    """What a call is optimised for (Parrot, section 5.2)."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Slo:
    """What a call was promised, in seconds from when it was ready; None where nothing was."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call as the policies see it: its prompt as chained hashes of whole tree blocks, never as text.

    `block_hashes[i]` stands for the first `(i + 1) * block_tokens` tokens of the prompt (see `block_hash`).
    """

    call_id: str
    model: str
    prompt_tokens: int
    block_tokens: int
    block_hashes: Sequence[int]
    slo: Slo | None = None
    objective: Objective | None = None
    priority: int = 0

    @property
    def cacheable_blocks(self) -> int:
        """Blocks that can come out of a cache: the last prompt token is always computed, its logits are needed."""
        return min(len(self.block_hashes), max(0, self.prompt_tokens - 1) // self.block_tokens)


class PlacementReason(StrEnum):
    """Why an engine was chosen; the `plait-placement` header, the log and the metrics carry it."""

    EXPLOIT = "exploit"
    EXPLORE = "explore"
    DECODE_BALANCE = "decode_balance"
    SHIFT = "shift"
    REPLICA = "replica"
    GROUP = "group"
    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What placing a call on an engine costs, in seconds of engine time (Preble, algorithm 2)."""

    window_s: float
    eviction_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        """L + M + P."""
        return self.window_s + self.eviction_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice of an engine for a call: `cached_tokens` is what that engine is expected to have of the prompt."""

    engine_id: str
    reason: PlacementReason
    cached_tokens: int
    missed_tokens: int
    cost: LoadCost | None = None
