"""The policies' values: a call, its objectives, and its placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class Objective(StrEnum):
    """What a call is optimised for (Parrot, section 5.2)."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


class Slo(NamedTuple):
    """A call's promised times, in seconds; None where no time was promised.

    TTFT and JCT count from when the call is ready. TPOT counts from the first token, for each token after it.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None

    @property
    def has_zero(self) -> bool:
        """Whether a time counts from when the call is ready, so that engines have to know how long it has waited."""
        return self.ttft_s is not None or self.jct_s is not None

    def from_zero(self, age_s: float) -> Slo:
        """The same promise for times that count from `age_s` seconds earlier."""
        return Slo(_later(self.ttft_s, age_s), self.tpot_s, _later(self.jct_s, age_s))


NO_SLO: Final = Slo()
"""No time was promised."""


def _later(time_s: float | None, seconds: float) -> float | None:
    return None if time_s is None else time_s + seconds


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """A call's task group. The completion time of its last call counts (Parrot, 5.2).

    `group_id` is unique in the gateway. `calls` counts the group's known calls that have not ended: waiting, ready and
    running ones, and this call.
    """

    group_id: str
    calls: int


class Call(NamedTuple):
    """One LLM call as the policies see it. Its prompt is given as chained hashes of whole tree blocks, not as text.

    `block_hashes[i]` is the hash of the first `(i + 1) * block_tokens` tokens of the prompt (see `block_hash`).
    `output_limit` is the most tokens that the call may generate; None if it has no limit. A call that is not `streamed`
    gets its whole answer at its end. `prompt_hash` stands for all tokens of the prompt (`block_hash.whole_hash`);
    None if the call has several prompts or answers. `session` is the client's name of its conversation; empty if it
    gives none.
    """

    call_id: str
    model: str
    prompt_tokens: int
    block_tokens: int
    block_hashes: Sequence[int]
    slo: Slo | None = None
    objective: Objective | None = None
    priority: int = 0
    group: TaskGroup | None = None
    output_limit: int | None = None
    streamed: bool = True
    prompt_hash: int | None = None
    session: str = ""

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
    CONTINUE = "continue"
    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The cost of placing a call on an engine, in seconds of engine time (Preble, algorithm 2)."""

    window_s: float
    eviction_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        """L + M + P."""
        return self.window_s + self.eviction_s + self.prefill_s


FIRST_TOKEN_WEIGHT: Final = 2.0
"""A second before a first token is one of TTFT and one of E2E."""


class DelayCost(NamedTuple):
    """The delay that a call on an engine causes to itself and to others, in seconds (see `delay`)."""

    queue_s: float
    prefill_s: float
    decode_s: float
    stall_s: float
    slow_s: float
    later_s: float = 0.0
    evicted_s: float = 0.0
    repaid_s: float = 0.0

    @property
    def first_token_s(self) -> float:
        """When the call's first token is expected."""
        return self.queue_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """All of it, with a weight of two for what is before first tokens."""
        before_s = self.queue_s + self.prefill_s + self.later_s
        rest_s = self.decode_s + self.stall_s + self.slow_s + self.evicted_s - self.repaid_s
        return FIRST_TOKEN_WEIGHT * before_s + rest_s


class Placement(NamedTuple):
    """The choice of an engine for a call. `cached_tokens` of the prompt are expected in that engine's cache.

    `meets_ttft` says whether that engine is expected to meet the call's TTFT; None: nothing is expected.
    """

    engine_id: str
    reason: PlacementReason
    cached_tokens: int
    missed_tokens: int
    cost: LoadCost | DelayCost | None = None
    meets_ttft: bool | None = None
