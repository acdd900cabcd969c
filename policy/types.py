"""What policies take and return: a call with its objectives, and the call's placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, Literal, NamedTuple, Protocol

CHARACTERS_PER_TOKEN: Final = 4
"""English text in most vocabularies."""

ESTIMATE_MARGIN = 1.5
"""A prompt whose tokens are estimated counts as too long only beyond this multiple of the context length.

Code and runs of spaces have fewer tokens than their characters suggest.
"""


class Objective(StrEnum):
    """What a call is optimised for (Parrot, section 5.2)."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


class Slo(NamedTuple):
    """A call's promised times, in seconds; None where no time was promised."""

    ttft_s: float | None = None
    """From zero (when the call is ready) to the first token."""

    tpot_s: float | None = None
    """The mean time of each token after the first."""

    jct_s: float | None = None
    """From zero to the last token."""

    is_deduced: bool = False
    """The gateway deduced the times from the calls that need this one. No client was promised them."""

    @property
    def has_zero(self) -> bool:
        """Whether a time counts from zero. Then the engine has to know how long the call has waited in the gateway."""
        return self.ttft_s is not None or self.jct_s is not None

    def is_missed(self, age_s: float) -> bool:
        """Whether a call without a first token `age_s` after zero has missed its TTFT or its JCT."""
        return (self.ttft_s is not None and age_s > self.ttft_s) or (self.jct_s is not None and age_s > self.jct_s)

    def from_zero(self, age_s: float) -> Slo:
        """The same deadlines, counted from a zero `age_s` seconds earlier."""
        return self._replace(ttft_s=_later(self.ttft_s, age_s), jct_s=_later(self.jct_s, age_s))


NO_SLO: Final = Slo()

NEAR_S: Final = 10.0
"""A TTFT is near so long before it is over. Longer than engines take for what they were sent, shorter than a queue."""


def _later(time_s: float | None, seconds: float) -> float | None:
    return None if time_s is None else time_s + seconds


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """A call's task group: only the time at which the group's last call ends matters (Parrot, section 5.2)."""

    group_id: str
    """Unique in the gateway."""

    calls: int
    """The group's known calls that have not ended, this one included: they wait for inputs, are ready, or run."""


class Call(NamedTuple):
    """One LLM call as the policies see it: hashes of its prompt's tree blocks, not its text."""

    call_id: str
    model: str
    prompt_tokens: int
    block_tokens: int
    """The length of a tree block, in tokens."""
    block_hashes: Sequence[int]
    """`block_hashes[i]` names the first `(i + 1) * block_tokens` tokens of the prompt (see `block_hash`)."""
    slo: Slo | None = None
    objective: Objective | None = None
    priority: int = 0
    """The lower goes first."""
    group: TaskGroup | None = None
    output_limit: int | None = None
    """The most tokens of each answer; None: no limit."""
    streamed: bool = True
    """False: the engine sends the whole answer at its end, so no first token is seen."""
    prompt_hash: int | None = None
    """Names all tokens of the prompt (`block_hash.whole_hash`); None with several prompts or answers."""
    session: str = ""
    """The client's name of the conversation; empty: none was given."""
    has_grammar: bool = False
    """The first token may wait until the engine has compiled a grammar."""
    arrived_s: float = 0.0
    """Zero: the times of `slo` count from here."""
    choices: int = 1
    """How many answers the client asks for (OpenAI's `n`)."""
    is_line: bool = False
    """A line of a batch, for which nobody waits."""
    tokens: Sequence[int] = ()
    """The prompt, where its tokens are known exactly."""

    @property
    def due_s(self) -> float:
        """The deadline of the first token; with a JCT alone, of the whole answer; infinite without either."""
        slo = self.slo
        if slo is None:
            return inf
        promised_s = slo.jct_s if slo.ttft_s is None else slo.ttft_s
        return inf if promised_s is None else self.arrived_s + promised_s

    @property
    def nears_s(self) -> float:
        """When the deadline of the first token is near; -inf: it is near at once, or there is none."""
        return -inf if self.slo is None or self.slo.ttft_s is None else self.due_s - NEAR_S

    def is_urgent(self, now_s: float) -> bool:
        """Whether the call goes by its deadline. While that is far, it goes by its prefix, as others do."""
        return self.due_s < inf and self.nears_s <= now_s

    @property
    def judged(self) -> Slo:
        """The promised times that its answer can show to be kept: one that is not streamed shows its end only."""
        slo = self.slo or NO_SLO
        return slo if self.streamed else slo._replace(ttft_s=None, tpot_s=None)

    @property
    def cacheable_blocks(self) -> int:
        """Blocks that a cache can supply. The last prompt token is always computed, because its logits are needed."""
        return min(len(self.block_hashes), max(0, self.prompt_tokens - 1) // self.block_tokens)


class PlacementReason(StrEnum):
    """The reasons of the policies in this package. A policy of the operator's own may give other words."""

    EXPLOIT = "exploit"
    EXPLORE = "explore"
    CONTINUE = "continue"
    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"


class Cost(Protocol):
    """A placement's cost in the terms of its policy, in seconds."""

    @property
    def total_s(self) -> float: ...


Rule = Literal["only_engine", "least_delay", "ttft", "group", "continues", "hand_over", "moved", "after_failure"]
"""Which rule of the gateway's own policy chose the engine.

- `only_engine`: no other engine takes the call;
- `least_delay`: the call costs least there;
- `ttft`: a cheaper engine would miss the TTFT or the JCT, or miss it by more;
- `group`: the calls of a task group are divided so that all of them together cost least;
- `continues`: the call continues another one, which ran there;
- `hand_over`: an engine that drains hands its prefixes over, which leaves some engines out;
- `moved`: the call waited in another engine's line, and this engine had room sooner;
- `after_failure`: an engine failed the call's previous attempt.

These are strings because reading a member of an `Enum` is a function call in Python 3.11.
"""


class Identified(Protocol):
    @property
    def engine_id(self) -> str: ...


class ComparedEngine(Protocol):
    """An engine whose cost for a call was computed."""

    @property
    def engine(self) -> Identified: ...

    @property
    def cached_blocks(self) -> int: ...

    @property
    def cost(self) -> Cost: ...

    @property
    def rank(self) -> tuple[float, float]:
        """(seconds by which the TTFT or JCT would be missed, total cost in seconds)."""
        ...


class Compared(NamedTuple):
    """The engines that a policy compared for a call."""

    rule: str
    """A `Rule`; the policy's name if the policy gives no rule."""
    candidates: Sequence[ComparedEngine] = ()
    """The engines whose cost is known."""
    engines: int = 0
    """How many engines were eligible."""
    next_best: ComparedEngine | None = None
    """The cheapest candidate other than the chosen one; None if there is none."""


class Margin(NamedTuple):
    """A placement's cost, and how much more the cheapest other candidate costs, in seconds; None without it."""

    cost_s: float | None = None
    margin_s: float | None = None
    next_engine: str | None = None


NO_MARGIN: Final = Margin()


class Placement(NamedTuple):
    """The choice of an engine for a call."""

    engine_id: str
    reason: str
    """A `PlacementReason`, or a policy's own word in printable ASCII. The `plait-placement` header, the log and the
    metrics show the word.
    """
    cached_tokens: int
    """Tokens of the prompt that are expected in the engine's cache, in any tier."""
    missed_tokens: int
    """All other tokens of the prompt."""
    cost: Cost | None = None
    meets_slo: bool | None = None
    """Whether TTFT and JCT are expected to be met; None: neither was promised, or the policy does not look."""
    first_token_s: float = 0.0
    """Expected seconds from the placement to the first token."""
    decode_s: float = 0.0
    """Expected seconds from the first token to the last; 0: not known."""
    loaded: Sequence[tuple[str, int]] = ()
    """(lower tier, tokens of `cached_tokens` that the engine loads from it)."""
    compared: Compared | None = None
    """None: the policy does not tell, and the router fills in the policy's name."""

    @property
    def rule(self) -> str | None:
        return None if self.compared is None else self.compared.rule

    def finding(self, cached_tokens: int, prompt_tokens: int) -> Placement:
        """The placement, if so much of the prompt is found."""
        return self._replace(cached_tokens=cached_tokens, missed_tokens=prompt_tokens - cached_tokens)

    def margin(self) -> Margin:
        cost, compared = self.cost, self.compared
        if cost is None:
            return NO_MARGIN
        cost_s = cost.total_s
        following = None if compared is None else compared.next_best
        if following is None:
            return Margin(cost_s)
        return Margin(cost_s, following.rank[1] - cost_s, following.engine.engine_id)
