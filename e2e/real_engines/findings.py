"""What a run of this suite measured: shown at its end, and written as JSON beside the project's other reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from plait.lab.simulation.claim import Claim

REPORTS: Final = Path(__file__).parents[2] / "reports"


@dataclass(slots=True)
class Findings:
    """`figures` by what they are of, and the claims that they bear out or not."""

    kind: str
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    def at_least(self, name: str, value: float, target: float) -> bool:
        """Record the claim that `value` reaches `target`; whether it does."""
        return self._claim(Claim(name, value, least=target))

    def at_most(self, name: str, value: float, target: float) -> bool:
        """Record the claim that `value` does not exceed `target`; whether that is so."""
        return self._claim(Claim(name, value, most=target))

    def write(self) -> None:
        """Write the report, where there is anything to report."""
        if self.claims:
            REPORTS.mkdir(exist_ok=True)
            report = {"figures": self.figures, "claims": [claim.json() for claim in self.claims]}
            (REPORTS / f"e2e-{self.kind}.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))

    def lines(self) -> Iterator[str]:
        """The figures, then the claims, for a terminal."""
        for subject, figures in self.figures.items():
            yield f"{subject}: {', '.join(f'{name} {_shown(value)}' for name, value in figures.items())}"
        for claim in self.claims:
            yield str(claim)

    def _claim(self, claim: Claim) -> bool:
        self.claims.append(claim)
        return claim.holds


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
