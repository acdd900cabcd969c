"""A claim about a run: a figure with its target."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure with its target bounds, which are fixed before any run.

    `where` names the load, the workload or the rival of the figure. `excused` is the reason why a claim may not hold
    without failing the run.
    """

    name: str
    value: float
    least: float = -inf
    most: float = inf
    where: str = ""
    excused: str = ""

    @property
    def holds(self) -> bool:
        return self.least <= self.value <= self.most

    @property
    def fails(self) -> bool:
        """Whether the figure is out of bounds without an excuse."""
        return not (self.holds or self.excused)

    @property
    def wanted(self) -> str:
        if self.least == self.most:
            return _shown(self.least)
        ends = [f">= {_shown(self.least)}"] if self.least > -inf else []
        ends += [f"<= {_shown(self.most)}"] if self.most < inf else []
        return " and ".join(ends)

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        excused = f"\n  {self.excused}" if self.excused and not self.holds else ""
        word = "holds" if self.holds else "FAILS"
        return f"{word}: {self.name}{where} = {self.value:,.3f}, wanted {self.wanted}{excused}"

    def json(self) -> dict[str, Any]:
        optional = {"where": self.where, "excused": "" if self.holds else self.excused}
        row = {"name": self.name, "value": self.value, "wanted": self.wanted, "holds": self.holds}
        return row | {key: text for key, text in optional.items() if text}


def _shown(bound: float) -> str:
    return f"{bound:,.0f}" if abs(bound) >= 1000 else f"{bound:.3g}"
