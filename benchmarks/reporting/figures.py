"""A figure of a paper, beside what was measured here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from benchmarks.reporting.stored import Stored

NEAR: Final = 0.95
"""So much of the paper's least value counts as reproduced."""


class Verdict(Enum):
    """How ours is beside the paper's."""

    BETTER = "better"
    REPRODUCED = "reproduced"
    IN_PART = "in part"
    BEHIND = "behind"
    ABSENT = "not here"
    NOT_RUN = "not run"


Values = Callable[[Stored], Sequence[float]]
"""The values that were measured: one, or those of several cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A factor that a paper gives for what it draws, from `least` to `most`, and the same here.

    `rival` gives the factors over the strongest simple alternative in the same runs, if there are any. `why` says why
    the values differ, or why there are none.
    """

    number: str
    what: str
    least: float | None = None
    most: float | None = None
    published: str = ""
    no_gain: float = 1.0
    """Where the paper only draws a gain: the value of no gain."""
    ours: Values | None = None
    rival: Values | None = None
    why: str = ""

    def verdict(self, stored: Stored) -> Verdict:
        """A range is judged by both ends. A value near the paper's is as good as the paper's."""
        if self.ours is None:
            return Verdict.ABSENT
        found = _values(self.ours, stored)
        if not found:
            return Verdict.NOT_RUN
        least, best = min(found), max(found)
        if self.least is None:
            return Verdict.REPRODUCED if best > self.no_gain else Verdict.BEHIND
        most = self.most or self.least
        if best < NEAR * self.least:
            return Verdict.BEHIND
        if best < NEAR * most or (self.most and least < NEAR * self.least):
            return Verdict.IN_PART
        return Verdict.BETTER if best > most else Verdict.REPRODUCED

    def row(self, stored: Stored) -> list[str]:
        """The cells of a table: number, factor, paper, ours, rival, verdict, reason."""
        return [
            self.number,
            self.what,
            self.published or shown([value for value in (self.least, self.most) if value is not None]),
            shown(_values(self.ours, stored)),
            shown(_values(self.rival, stored)),
            self.verdict(stored).value,
            self.why,
        ]


def _values(values: Values | None, stored: Stored) -> Sequence[float]:
    """The values; none where no report has them."""
    try:
        return values(stored) if values else []
    except LookupError:
        return []


def shown(values: Sequence[float]) -> str:
    """One value, or the least and the most of several."""
    ends = dict.fromkeys((_number(min(values)), _number(max(values)))) if values else {}
    return " to ".join(ends)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
