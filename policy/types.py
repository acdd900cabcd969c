"""The policies' values: a call, its objectives, and its placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, Literal, NamedTuple, Protocol

CHARACTERS_PER_TOKEN: Final = 4
"""English text in most vocabularies."""

ESTIMATE_MARGIN = 1.5
"""So many times a context's tokens an estimate has to be before a prompt counts as longer: code and runs of spaces have
fewer tokens than their characters suggest.
"""


class Objective(StrEnum):
    """What a call is optimised for (Parrot, section 5.2)."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


class Slo(NamedTuple):
    """A call's promised times, in seconds; None where no time was promised.

    TTFT and JCT count from when the call is ready. TPOT counts from the first token, for each token after it. If they
    are `is_deduced`, the gateway has deduced them from what the call is needed for: nobody was promised them.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None
    is_deduced: bool = False

    @property
    def has_zero(self) -> bool:
        """Whether a time counts from when the call is ready, so that engines have to know how long it has waited."""
        return self.ttft_s is not None or self.jct_s is not None

    def is_missed(self, age_s: float) -> bool:
        """Whether a call that has no token yet after `age_s` is too late for its first one, or for its last one."""
        return (self.ttft_s is not None and age_s > self.ttft_s) or (self.jct_s is not None and age_s > self.jct_s)

    def from_zero(self, age_s: float) -> Slo:
        """The same promise for times that count from `age_s` seconds earlier."""
        return self._replace(ttft_s=_later(self.ttft_s, age_s), jct_s=_later(self.jct_s, age_s))


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
    gives none. An answer that `has_grammar` may wait until the engine has compiled the grammar. The times of `slo`
    count from `arrived_s`. It has `choices` answers, each of `output_limit` at most.
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
    has_grammar: bool = False
    arrived_s: float = 0.0
    choices: int = 1

    @property
    def due_s(self) -> float:
        """The time by which the first token was promised, or with a JCT alone the answer; infinite without either."""
        slo = self.slo
        if slo is None:
            return inf
        promised_s = slo.jct_s if slo.ttft_s is None else slo.ttft_s
        return inf if promised_s is None else self.arrived_s + promised_s

    @property
    def cacheable_blocks(self) -> int:
        """Blocks that a cache can supply. The last prompt token is always computed, because its logits are needed."""
        return min(len(self.block_hashes), max(0, self.prompt_tokens - 1) // self.block_tokens)


class PlacementReason(StrEnum):
    """Why an engine was chosen, as the policies here say it."""

    EXPLOIT = "exploit"
    EXPLORE = "explore"
    CONTINUE = "continue"
    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"


class Cost(Protocol):
    """What a placement costs, as its policy sees it."""

    @property
    def total_s(self) -> float: ...


Rule = Literal["only_engine", "least_delay", "ttft", "group", "continues", "hand_over", "moved", "after_failure"]
"""Why a call was placed where it was, as the gateway's own policy says it.

- `only_engine`: no other takes it;
- `least_delay`: it costs least there;
- `ttft`: a cheaper engine would miss the TTFT or the JCT, or miss it by more;
- `group`: the calls of a task group are divided so that all of them together cost least;
- `continues`: the call that it continues ran there;
- `hand_over`: an engine that drains hands its prefixes over, which leaves some engines out;
- `moved`: it waited in another engine's line, and this one had room sooner;
- `after_failure`: the attempt before it had failed.

Strings, and no enumeration: reading a member costs Python 3.11 a call.
"""


class Identified(Protocol):
    @property
    def engine_id(self) -> str: ...


class ComparedEngine(Protocol):
    """An engine that was looked at for a call."""

    @property
    def engine(self) -> Identified: ...

    @property
    def cached_blocks(self) -> int: ...

    @property
    def cost(self) -> Cost: ...

    @property
    def rank(self) -> tuple[float, float]:
        """By how much it would miss its times there, and all of the cost, in seconds."""
        ...


class Compared(NamedTuple):
    """What a policy has compared. The `rule` is a `Rule`, or the name of a policy that tells none.

    It chose from so many `engines` and looked at the `candidates`. No other engine costs less than `others_s`, which is
    infinite if there is none.
    """

    rule: str
    candidates: Sequence[ComparedEngine] = ()
    engines: int = 0
    others_s: float = inf

    def next_best(self, engine_id: str) -> ComparedEngine | None:
        """The cheapest engine beside this one; None if it is not known, or there is none."""
        best = None
        for one in self.candidates:
            if one.engine.engine_id != engine_id and (best is None or one.rank[1] < best.rank[1]):
                best = one
        return None if best is None or best.rank[1] > self.others_s else best


class Margin(NamedTuple):
    """What a placement costs, and how much more the next engine does, in seconds.

    If it is not known which engine is the next one, no other costs less than the margin more. It is None where nothing
    was compared.
    """

    cost_s: float | None = None
    margin_s: float | None = None
    next_engine: str | None = None


NO_MARGIN: Final = Margin()


class Placement(NamedTuple):
    """The choice of an engine for a call. `cached_tokens` of the prompt are expected in that engine's cache.

    The engine brings as many of them back from each lower tier as `loaded` says, by the tier's name.

    The `plait-placement` header, the log and the metrics show the `reason`: a `PlacementReason`, or a policy's own
    word in printable ASCII.
    `meets_slo` says whether the call's first token and its last one are expected in time there; None: no time was
    promised for them, or the policy does not look. The first token is expected `first_token_s` after the placement, and
    the last one `decode_s` after the first (0: not known). `compared` is None if the policy does not tell: then the
    router names the policy.
    """

    engine_id: str
    reason: str
    cached_tokens: int
    missed_tokens: int
    cost: Cost | None = None
    meets_slo: bool | None = None
    first_token_s: float = 0.0
    decode_s: float = 0.0
    loaded: Sequence[tuple[str, int]] = ()
    compared: Compared | None = None

    @property
    def rule(self) -> str | None:
        return None if self.compared is None else self.compared.rule

    def margin(self) -> Margin:
        """What it costs, and what the next engine would."""
        cost, compared = self.cost, self.compared
        if cost is None:
            return NO_MARGIN
        cost_s = cost.total_s
        following = None if compared is None else compared.next_best(self.engine_id)
        if following is not None:
            return Margin(cost_s, following.rank[1] - cost_s, following.engine.engine_id)
        if compared is None or compared.others_s == inf:
            return Margin(cost_s)
        return Margin(cost_s, compared.others_s - cost_s)
