"""A call's receipt: the engines that were compared, what the call waited for, and how it ended, without its texts.

Times are in seconds from the call's arrival. Receipts are stored as MessagePack arrays, some 350 bytes with three
candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Final

import msgspec

from plait.policy.costs.delay import BEFORE_FIRST_TOKENS, FIRST_TOKEN_WEIGHT, DelayCost
from plait.policy.types import Compared, Placement

PARTS: Final = ("queue", "prefill", "later", "decode", "stall", "slow", "evicted", "repaid", "load")
"""The parts of a cost (see `delay`). New ones go last, because gateways of other versions may know fewer."""

WEIGHTS: Final[Mapping[str, float]] = {
    **dict.fromkeys(PARTS, 1.0), **dict.fromkeys(BEFORE_FIRST_TOKENS, FIRST_TOKEN_WEIGHT), "repaid": -1.0,
}  # fmt: skip
"""The weight of each part's seconds in the cost."""

_SECONDS: Final = Struct("<9f")
_SECOND: Final = Struct("<f")


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A compared engine. `parts` are the seconds of `PARTS` as floats, or the total cost of a policy without parts."""

    engine: str
    cached_tokens: int
    parts: bytes | float

    @property
    def parts_s(self) -> dict[str, float]:
        """The unweighted parts of the cost by name; empty if they are not known."""
        if isinstance(self.parts, float):
            return {}
        seconds = [one for (one,) in _SECOND.iter_unpack(self.parts)]
        return dict(zip(PARTS, seconds, strict=False))

    @property
    def cost_s(self) -> float:
        """The weighted sum of the parts."""
        if isinstance(self.parts, float):
            return self.parts
        return sum(WEIGHTS[part] * seconds for part, seconds in self.parts_s.items())


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One placement of a call; `rule`, `reason` and the predictions are as in `policy.types.Placement`."""

    engine: str
    rule: str
    reason: str
    placed_s: float
    sent_s: float | None
    """None: not sent."""
    cached_tokens: int
    decode_s: float
    meets_slo: bool | None = None
    engines: int = 0
    """How many engines were eligible."""
    candidates: tuple[Candidate, ...] = ()
    """The chosen engine first."""
    ended_by: str = ""
    """Why the attempt failed; empty: it did not."""
    loaded: tuple[tuple[str, int], ...] = ()
    """(lower tier, tokens of `cached_tokens` from there)."""
    estimated_tokens: int | None = None
    """What the engine's estimated cache had of the prompt: `cached_tokens` are the share that is expected to be found.
    None: all of it, or the engine reports its cache.
    """

    @property
    def chosen(self) -> Candidate | None:
        """The chosen engine; None if its cost is not known."""
        return self.candidates[0] if self.candidates and self.candidates[0].engine == self.engine else None

    @property
    def next_best(self) -> Candidate | None:
        """The cheapest other candidate; None if there is none."""
        return min(self.candidates[1:], key=lambda one: one.cost_s, default=None)

    @property
    def margin_s(self) -> float | None:
        """How much more the next candidate costs; None without one."""
        following, chosen = self.next_best, self.chosen
        return None if following is None or chosen is None else following.cost_s - chosen.cost_s


class EndedWait(msgspec.Struct, frozen=True, array_like=True):
    """A reason for which a call waited, and for how many seconds."""

    why: str
    for_s: float


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A waiting call moved to another engine, with the predicted gain; None: the old one no longer took calls."""

    from_engine: str
    to_engine: str
    at_s: float
    gain_s: float | None


class Limit(msgspec.Struct, frozen=True, array_like=True):
    """A limit that a request exceeded: `most` is allowed, and `used` was in use."""

    name: str
    most: float
    used: float


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """The record of a call, or of a request that was refused before it became one."""

    tenant: str
    request_id: str
    at: float
    """The arrival, in seconds since 1970."""
    path: str
    model: str
    status: int
    outcome: str
    code: str | None = None
    message: str | None = None
    """For operators only, because it may quote a request."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    first_s: float | None = None
    e2e_s: float = 0.0
    slo: tuple[float | None, float | None, float | None] | None = None
    """The promised TTFT, TPOT and JCT."""
    trace_id: str = ""
    choices: tuple[Choice, ...] = ()
    waits: tuple[EndedWait, ...] = ()
    moves: tuple[Move, ...] = ()
    limit: Limit | None = None
    retry_after_s: float | None = None
    agent: str = ""
    """The agent that sent the call, and the agent that has begun this one; empty: not known."""
    parent: str = ""
    program: str = ""
    """The call's program (`Slot.program`), and the calls that made its inputs."""
    made_by: tuple[str, ...] = ()
    key: str = ""
    """The id of the client's API key; empty: none, or not known any more."""
    usage: tuple[int, int, int | None] | None = None
    """The tokens of prompt, answer and hit that the engine reported last; None: it reported none."""
    passed_tokens: int = 0
    """As in `Answer`."""
    cost: int | None = None
    """In 1e-9 of the currency; None: the model has no price."""
    is_line: bool = False
    """Whether it is a line of a batch."""

    @property
    def waited_s(self) -> float:
        return sum(wait.for_s for wait in self.waits)

    @property
    def late_s(self) -> float | None:
        """How much later than expected at the last placement the first token came; None if not known."""
        expected_s = self.expected_first_s
        return None if expected_s is None or self.first_s is None else self.first_s - expected_s

    @property
    def expected_first_s(self) -> float | None:
        """When the last placement expected the first token."""
        chosen = self.choices[-1].chosen if self.choices else None
        if chosen is None or not chosen.parts_s:
            return None
        parts_s = chosen.parts_s
        return self.choices[-1].placed_s + parts_s["queue"] + parts_s.get("load", 0.0) + parts_s["prefill"]


def choice_of(
    placement: Placement,
    rule: str | None,
    *,
    placed_s: float,
    sent_s: float | None,
    block_tokens: int,
    ended_by: str = "",
    estimated_tokens: int | None = None,
) -> Choice:
    """Make the record of a placement; `rule` None: the placement's own."""
    compared, cost = placement.compared or _NOTHING, placement.cost
    candidates: tuple[Candidate, ...] = ()
    if compared.candidates:
        candidates = _candidates(placement.engine_id, compared, block_tokens)
    elif cost is not None:
        candidates = (Candidate(placement.engine_id, placement.cached_tokens, cost.total_s),)
    return Choice(
        placement.engine_id,
        rule or compared.rule,
        placement.reason,
        placed_s,
        sent_s,
        placement.cached_tokens,
        placement.decode_s,
        placement.meets_slo,
        compared.engines,
        candidates,
        ended_by,
        tuple(placement.loaded),
        estimated_tokens,
    )


_NOTHING: Final = Compared("")


def _candidates(engine_id: str, compared: Compared, block_tokens: int) -> tuple[Candidate, ...]:
    """The compared engines, the chosen one first."""
    found: list[Candidate] = []
    for one in compared.candidates:
        cost = one.cost
        parts: bytes | float
        if isinstance(cost, DelayCost):
            parts = _SECONDS.pack(
                cost.queue_s, cost.prefill_s, cost.later_s, cost.decode_s, cost.stall_s, cost.slow_s, cost.evicted_s,
                cost.repaid_s, cost.load_s,
            )  # fmt: skip
        else:
            parts = cost.total_s
        candidate = Candidate(one.engine.engine_id, one.cached_blocks * block_tokens, parts)
        found.insert(0 if candidate.engine == engine_id else len(found), candidate)
    return tuple(found)
