"""The stored reports of benchmarks: `docs/results/NAME.json`, each written by the command that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[2] / "docs" / "results"


@dataclass(frozen=True, slots=True)
class Stored:
    """All reports, by the names of their files."""

    reports: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Stored:
        """Read the reports in a folder."""
        return cls({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))})

    def claims(self, report: str, contains: str) -> list[Mapping[str, Any]]:
        """The claims of a report whose names contain this. Raises LookupError if there are none."""
        claims = self.reports[report]["claims"]
        found = [claim for claim in claims if contains in claim["name"] and claim["value"] is not None]
        if not found:
            raise LookupError(f"no claim of {report} is about {contains!r}")
        return found

    def value(self, report: str, name: str) -> float:
        """The value of the claim with this name. Raises LookupError if there is none."""
        values = [float(claim["value"]) for claim in self.claims(report, name) if claim["name"] == name]
        if not values:
            raise LookupError(f"{report} has no claim {name!r}")
        return values[0]

    def rows(self, report: str, **match: Any) -> Iterator[Mapping[str, Any]]:
        """The results with these values. Raises LookupError if there is no such report."""
        for row in self.reports[report]["results"]:
            if all(row.get(key) == value for key, value in match.items()):
                yield row
