"""Which feature works with which client: shown at the end of a run, and written beside the project's other reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from e2e.clients.program_run import Outcome
from e2e.real_engines.findings import REPORTS

FEATURES: Final[Mapping[str, str]] = {
    "models": "models",
    "chat": "chat",
    "stream": "stream",
    "usage": "usage",
    "tools": "tools",
    "schema": "schema",
    "image": "image",
    "embeddings": "embed",
    "responses": "resp",
    "responses stream": "resp stream",
    "responses continue": "resp continue",
    "responses tools": "resp tools",
    "messages": "msg",
    "messages stream": "msg stream",
    "messages tools": "msg tools",
    "count tokens": "count",
    "async": "async",
    "wrong model": "wrong model",
    "wrong key": "wrong key",
    "retry": "retry",
}
"""Each feature and the heading of its column."""


@dataclass(slots=True)
class Matrix:
    """Outcomes by client and feature."""

    rows: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def enter(self, client: str, outcomes: Iterable[Outcome]) -> None:
        """Enter what a client's program said. Raises `KeyError` for a feature without a column."""
        row = self.rows.setdefault(client, {})
        for outcome in outcomes:
            assert outcome.feature in FEATURES, outcome.feature
            row[outcome.feature] = outcome

    def skip(self, client: str, why: str) -> None:
        """Enter a client that could not run here."""
        self.rows.setdefault(client, {})
        self.skipped[client] = why

    def note(self, line: str) -> None:
        """Add a line below the table."""
        self.notes.append(line)

    def write(self) -> None:
        """Write the report, if anything ran."""
        if self.rows or self.notes:
            REPORTS.mkdir(exist_ok=True)
            (REPORTS / "e2e-clients.md").write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> Iterator[str]:
        """A table, `+` for what works, `-` for a client that did not run, and the reasons below it."""
        if self.rows:
            yield from self._table()
        for client, why in self.skipped.items():
            yield f"{client} did not run: {why}."
        yield from self.notes
        for client, row in self.rows.items():
            yield from (f"{client}, {o.feature}: {o.detail}" for o in row.values() if not o.ok)

    def _table(self) -> Iterator[str]:
        width = max(map(len, self.rows))
        yield f"| {'':{width}} | {' | '.join(FEATURES.values())} |"
        yield f"|{'-' * (width + 2)}|{'|'.join('-' * (len(heading) + 2) for heading in FEATURES.values())}|"
        for client, row in self.rows.items():
            absent = "-" if client in self.skipped else ""
            cells = (f"{_shown(row.get(name), absent):^{len(heading)}}" for name, heading in FEATURES.items())
            yield f"| {client:{width}} | {' | '.join(cells)} |"
        yield ""


def _shown(outcome: Outcome | None, absent: str) -> str:
    if outcome is None:
        return absent
    return "+" if outcome.ok else "FAILS"
