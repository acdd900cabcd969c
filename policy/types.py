"""The policies' values: a call, its objectives, and its placement."""

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
    """A call's promised times, in seconds; None where no time was promised.

    TTFT and JCT count from when the call is ready. TPOT counts from the first token, for each token after it.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """A call's task group. The completion time of its last call counts (Parrot, 5.2).

    `group_id` is unique in the gateway. `calls` counts the group's known calls that have not ended: waiting, ready and
    running ones, and this call. `shared_tokens` is the length of the prefix that all their prompts share, 0 if no
    shared prefix is known.
    """

    group_id: str
    calls: int
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call as the policies see it. Its prompt is given as chained hashes of whole tree blocks, not as text.

    `block_hashes[i]` is the hash of the first `(i + 1) * block_tokens` tokens of the prompt (see `block_hash`).
    `application` names the call's application (tenant and session). It is None if the application is not known.
    `output_limit` is the most tokens that the call may generate; None if it has no limit. A call that is not `streamed`
    gets its whole answer at its end.
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
    output_limit: int | None = None
    streamed: bool = True

    @property
    def unannotated(self) -> bool:
        """Whether the call has no application, no objective and no task group."""
        return self.application is None and self.objective is None and self.group is None

    @property
    def served_as(self) -> Objective | None:
        """The objective that placement uses. Calls of a task group count as throughput calls: they run in batches."""
        return self.objective if self.group is None else Objective.THROUGHPUT

    @property
    def cacheable_blocks(self) -> int:
        """Blocks that a cache can supply. The last prompt token is always computed, because its logits are needed."""
        return min(len(self.block_hashes), max(0, self.prompt_tokens - 1) // self.block_tokens)


class PlacementReason(StrEnum):
    """Why an engine was chosen. The `plait-placement` header, the log and the metrics show the reason."""

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
    """The cost of placing a call on an engine, in seconds of engine time (Preble, algorithm 2).

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
    """The choice of an engine for a call. `cached_tokens` of the prompt are expected in that engine's cache.

    `places` has, for each engine, how many calls of the task group are to follow there. It is None if the placement
    decided no places.
    """

    engine_id: str
    reason: PlacementReason
    cached_tokens: int
    missed_tokens: int
    cost: LoadCost | None = None
    places: Mapping[str, int] | None = field(default=None, hash=False)
