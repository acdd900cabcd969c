"""The values the policies speak in: a call, what it was promised, and where it was placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
class TaskGroup:
    """The task group that a call is part of: what counts is when the last of its calls has completed (Parrot, 5.2).

    `group_id` is unique in the gateway. `calls` is how many calls of it are known and have not ended, this one
    included, whether they wait, run or are ready. `shared_tokens` is how much of this call's prompt, from its start, is
    known to be the same in all of them; 0 where that is not known.
    """

    group_id: str
    calls: int
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call as the policies see it: its prompt as chained hashes of whole tree blocks, never as text.

    `block_hashes[i]` stands for the first `(i + 1) * block_tokens` tokens of the prompt (see `block_hash`).
    `application` names whom it is a call of (tenant and session), None if nobody has said so.
    """

    call_id: str
    model: str
    prompt_tokens: int
    block_tokens: int
    block_hashes: Sequence[int]
    slo: Slo | None = None
    objective: Objective | None = None
    priority: int = 0
    application: str | None = None
    group: TaskGroup | None = None

    @property
    def unannotated(self) -> bool:
        """Whether nobody has said anything of it that placement takes into account."""
        return self.application is None and self.objective is None and self.group is None

    @property
    def served_as(self) -> Objective | None:
        """How an engine serves it: calls of a task group in large batches, as throughput calls."""
        return self.objective if self.group is None else Objective.THROUGHPUT

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
    CONTINUE = "continue"
    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What placing a call on an engine costs, in seconds of engine time (Preble, algorithm 2).

    `harm_s` and `apart_s` are 0 for calls without an objective and without an application (see `harm`, `application`).
    """

    window_s: float
    eviction_s: float
    prefill_s: float
    harm_s: float = 0.0
    apart_s: float = 0.0

    @property
    def total_s(self) -> float:
        """L + M + P, harm, and distance from the rest of the application."""
        return self.window_s + self.eviction_s + self.prefill_s + self.harm_s + self.apart_s


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice of an engine for a call: `cached_tokens` is what that engine is expected to have of the prompt.

    `places` are how many calls of its task group are to follow on which engine; None if nothing was decided for them.
    """

    engine_id: str
    reason: PlacementReason
    cached_tokens: int
    missed_tokens: int
    cost: LoadCost | None = None
    places: Mapping[str, int] | None = field(default=None, hash=False)
