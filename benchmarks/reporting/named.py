"""Figures that sentences name: `6.2<!-- mission: NAME -->` says that the claim with this name has the value 6.2.

The comment stands behind the number, which may have a percent sign. What a claim is about stands behind its name in
brackets, `1 / mission: NAME (WHERE)` stands for the inverse. A number has to be the stored value to all its digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.reporting.stored import Stored

NAMED: Final = re.compile(
    r"(?P<number>\d*\.?\d+)(?P<percent> %)?\s?<!--\s(?P<inverse>1 / )?(?P<report>\w+):\s(?P<claim>.+?)\s-->", re.DOTALL
)
FIGURE: Final = re.compile(r"\d*\.\d+|\d+ %|\d+ times")
RESULTS: Final = re.compile(r"\]\([^)]*(?:results|measurements/claims)\.md[^)]*\)")
"""A link to the stored figures."""
COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)


def contradictions(text: str, stored: Stored) -> Iterator[str]:
    """What the text says otherwise than the reports, and what it names that no report has."""
    for found in NAMED.finditer(text):
        report, claim = found["report"], " ".join(found["claim"].split())
        try:
            value = _value(stored, report, claim)
        except LookupError:
            yield f"{found['number']}: {report} has no claim {claim!r}"
            continue
        value = (1 / value if found["inverse"] else value) * (100 if found["percent"] else 1)
        if abs(value - float(found["number"])) > 0.5 * 10.0 ** -len(found["number"].partition(".")[2]) + 1e-9:
            yield f"{found['number']}{found['percent'] or ''}: {report} has {value:.4g}: {claim}"


def _value(stored: Stored, report: str, asked: str) -> float:
    """The value of the claim. Raises LookupError if there is none."""
    for claim in stored.reports[report]["claims"]:
        where = f" ({claim['where']})" if "where" in claim else ""
        if f"{claim['name']}{where}" == asked:
            return float(claim["value"])
    raise LookupError(asked)


def unnamed(text: str) -> Iterator[str]:
    """The sentences that refer to the results and have a figure, and do not say which claim it is of."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(("|", "```", "#")):
            continue
        text = COMMENT.sub("", NAMED.sub("", paragraph)).replace("\n", " ")
        for sentence in re.split(r"(?<=[.:]) (?=[A-Z*`\[])", text):
            if RESULTS.search(sentence) and FIGURE.search(sentence):
                yield sentence


def pages(root: Path) -> list[Path]:
    """README and all pages of the documentation."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
