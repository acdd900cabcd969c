"""What goes wrong with one engine of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Sign(StrEnum):
    """What shows that an engine is out: no calls or connections arrive there, or no call waits for it any more.

    An engine that hangs gets few calls anyway, since those that it has do not end; so arrivals do not show it.
    """

    CALLS = "calls"
    CONNECTIONS = "connections"
    SLOW_CALLS = "slow calls"
    STAYS = "stays in"


@dataclass(frozen=True, slots=True)
class Case:
    """`modes` are names of `e2e.faults.modes`. An engine should be out within `out_within_s`."""

    name: str
    modes: Sequence[str]
    sign: Sign = Sign.CALLS
    out_within_s: float = 5.0


CASES: Final = (
    Case("500", ["status_500_json"]),
    Case("503", ["status_503_json"]),
    Case("429", ["status_429_json"]),
    Case("502", ["status_502_html"]),
    Case("close at accept", ["accept_close"], Sign.CONNECTIONS),
    Case("reset mid-head", ["head_reset"]),
    Case("hang at connect", ["hang_backlog"], Sign.SLOW_CALLS),
    Case("hang after head", ["hang_head_whole", "hang_head_stream"], Sign.SLOW_CALLS, out_within_s=12.0),
    Case("garbage", ["not_http"]),
    Case("wrong usage", ["usage_huge"], Sign.STAYS),
    Case("wrong cache_state", ["report_cyclic_runs"], Sign.STAYS),
)
QUICK: Final = ("500", "close at accept", "wrong usage")
