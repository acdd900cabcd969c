"""Calls that wait in lines, in short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plait.policy.admission.fair_shares import FairShares
from plait.policy.admission.line import Line
from plait.policy.costs.prefill_queue import Precedence
from plait.policy.order import Rank


@dataclass(slots=True, eq=False)
class Asked:
    """A call of which the engine has the part `cached`."""

    tenant: str
    tokens: int
    rank: Rank = Rank.PLAIN
    precedence: Precedence = Precedence.REST
    priority: int = 0
    number: int = 0
    work_s: float = 0.0
    prefill_s: float = 0.0
    is_back: bool = False
    cached: float = 0.0
    conversation: str = ""


def asked(
    tenant: str = "a", tokens: int = 100, rank: Rank = Rank.PLAIN, *, cached: float = 0.0, prefill: float = 1.0
) -> Asked:
    """A call of which the part `prefill` is prefill."""
    work_s = tokens / 1000
    return Asked(tenant, tokens, rank, work_s=work_s, prefill_s=prefill * work_s, cached=cached)


def new_lines(number: int, weights: Mapping[str, float] | None = None) -> tuple[FairShares, list[Line[Asked]]]:
    """Lines that share one fleet's virtual times."""
    shares = FairShares(weights)
    lines = [Line[Asked](shares, lambda call: call.cached) for _ in range(number)]

    def tell(tenant: str) -> None:
        for line in lines:
            line.earlier(tenant)

    shares.on_earlier = tell
    return shares, lines


def new_line(*calls: Asked, weights: Mapping[str, float] | None = None) -> Line[Asked]:
    _, (line,) = new_lines(1, weights)
    for call in calls:
        line.push(call)
    return line


def taken(line: Line[Asked], calls: int) -> list[Asked]:
    found = []
    for _ in range(calls):
        found.append(line.take())
        line.check()
    return found


def tenants(calls: list[Asked]) -> Counter[str]:
    return Counter(call.tenant for call in calls)
