"""A call's receipt: what was compared when it was placed, what it waited for, and how it ended. It has no text.

Times are in seconds, and count from the call's arrival. Receipts are kept as MessagePack arrays: some 350 bytes with
three candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from struct import Struct
from typing import Final

import msgspec

from plait.policy.costs.delay import BEFORE_FIRST_TOKENS, FIRST_TOKEN_WEIGHT, DelayCost
from plait.policy.types import Compared, Placement

PARTS: Final = ("queue", "prefill", "later", "decode", "stall", "slow", "evicted", "repaid", "load")
"""The parts of a cost, as `delay` explains them. Gateways of other versions may know fewer: new ones come last."""

WEIGHTS: Final[Mapping[str, float]] = {
    **dict.fromkeys(PARTS, 1.0), **dict.fromkeys(BEFORE_FIRST_TOKENS, FIRST_TOKEN_WEIGHT), "repaid": -1.0,
}  # fmt: skip
"""How a part's seconds count: those before a first token twice."""

_SECONDS: Final = Struct("<9f")
_SECOND: Final = Struct("<f")
ROUNDING_S: Final = 1e-4
"""Costs are kept with seven digits: equal ones may differ by less."""


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """An engine that was looked at. `parts` are the seconds of `PARTS`, or the one cost that a policy has told."""

    engine: str
    cached_tokens: int
    parts: bytes | float

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts of the cost by their names, not weighed; empty if they are not known."""
        if isinstance(self.parts, float):
            return {}
        seconds = [one for (one,) in _SECOND.iter_unpack(self.parts)]
        return dict(zip(PARTS, seconds, strict=False))

    @property
    def cost_s(self) -> float:
        """All of the cost: the parts by their weights."""
        if isinstance(self.parts, float):
            return self.parts
        return sum(WEIGHTS[part] * seconds for part, seconds in self.parts_s.items())


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One placement of a call, by this `rule`. `candidates` has the chosen engine first.

    It was chosen from so many `engines`. None of those that are no candidates costs less than `others_s`. `ended_by` is
    why the attempt there failed; empty if it did not. `sent_s` is None for a call that was not sent. Of the cached
    tokens, `loaded` come from the engine's lower tiers.
    """

    engine: str
    rule: str
    reason: str
    placed_s: float
    sent_s: float | None
    cached_tokens: int
    decode_s: float
    meets_slo: bool | None = None
    engines: int = 0
    others_s: float | None = None
    candidates: tuple[Candidate, ...] = ()
    ended_by: str = ""
    loaded: tuple[tuple[str, int], ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The engine that was chosen; None if the policy has told no cost."""
        return self.candidates[0] if self.candidates and self.candidates[0].engine == self.engine else None

    @property
    def next_best(self) -> Candidate | None:
        """The cheapest other engine; None if there is none, or it is not known."""
        best = min(self.candidates[1:], key=lambda one: one.cost_s, default=None)
        return (
            best if best is not None and (self.others_s is None or best.cost_s <= self.others_s + ROUNDING_S) else None
        )

    @property
    def margin_s(self) -> float | None:
        """How much more the next engine costs, or at least, if it is not known which that is; None without others."""
        following, chosen = self.next_best, self.chosen
        least_s = self.others_s if following is None else following.cost_s
        return None if least_s is None or chosen is None else least_s - chosen.cost_s


class EndedWait(msgspec.Struct, frozen=True, array_like=True):
    """So long a call waited for this."""

    why: str
    for_s: float


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A waiting call went to another engine's line, which was to cost so much less; None if it had to go."""

    from_engine: str
    to_engine: str
    at_s: float
    gain_s: float | None


class Limit(msgspec.Struct, frozen=True, array_like=True):
    """A limit that a request was above: `most` is allowed, and so much was `used`."""

    name: str
    most: float
    used: float


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """The record of a call that is kept, or of a request that was refused before it was one. `at` counts from 1970.

    `message` may quote a request: it is for operators. `slo` has the TTFT, the TPOT and the JCT that were promised.
    """

    tenant: str
    request_id: str
    at: float
    path: str
    model: str
    status: int
    outcome: str
    code: str | None = None
    message: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    first_s: float | None = None
    e2e_s: float = 0.0
    slo: tuple[float | None, float | None, float | None] | None = None
    trace_id: str = ""
    choices: tuple[Choice, ...] = ()
    waits: tuple[EndedWait, ...] = ()
    moves: tuple[Move, ...] = ()
    limit: Limit | None = None
    retry_after_s: float | None = None

    @property
    def waited_s(self) -> float:
        return sum(wait.for_s for wait in self.waits)

    @property
    def late_s(self) -> float | None:
        """How much later the first token came than was expected at the last placement; None if that is not known."""
        expected_s = self.expected_first_s
        return None if expected_s is None or self.first_s is None else self.first_s - expected_s

    @property
    def expected_first_s(self) -> float | None:
        """When the first token was expected, as the last placement had it."""
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
) -> Choice:
    """A placement as it is kept. Without a `rule` its own counts."""
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
        None if compared.others_s == inf else compared.others_s,
        candidates,
        ended_by,
        tuple(placement.loaded),
    )


_NOTHING: Final = Compared("")


def _candidates(engine_id: str, compared: Compared, block_tokens: int) -> tuple[Candidate, ...]:
    """The engines that were looked at, the chosen one first. This calls nothing for each of them."""
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
