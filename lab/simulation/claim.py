"""A claim about a run: a figure with its target."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure with its target bounds, which are fixed before any run.

    `where` names the load, the workload or the rival of the figure. `excused` is the reason why a claim may not hold
    without failing the run. The figure is that of all seeds together, and alone decides; `by_seed` has that of each,
    so that a reader sees how far the figure is from its bound in terms of what seeds differ.
    """

    name: str
    value: float
    least: float = -inf
    most: float = inf
    where: str = ""
    excused: str = ""
    by_seed: tuple[float, ...] = ()

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
        seeds = f" ({min(self.by_seed):,.3f} to {max(self.by_seed):,.3f} by seed)" if len(self.by_seed) > 1 else ""
        return f"{word}: {self.name}{where} = {self.value:,.3f}{seeds}, wanted {self.wanted}{excused}"

    def json(self) -> dict[str, Any]:
        optional = {"where": self.where, "excused": "" if self.holds else self.excused}
        row: dict[str, Any] = {"name": self.name, "value": self.value, "wanted": self.wanted, "holds": self.holds}
        row |= {"by_seed": list(self.by_seed)} if self.by_seed else {}
        return row | {key: text for key, text in optional.items() if text}


def _shown(bound: float) -> str:
    return f"{bound:,.0f}" if abs(bound) >= 1000 else f"{bound:.3g}"
