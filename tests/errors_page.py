"""The page of error codes, drawn from their table. `python -m tests.errors_page` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from plait.backends.error_codes import GROUPS
from tests.source_tree import ROOT

PAGE: Final = ROOT / "docs" / "errors.md"


def text() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Errors"
    yield ""
    yield "Every code of Plait's own errors (`error.code`, from `backends/error_codes.py`). `plait explain CODE` prints"
    yield "a row. Codes of engines pass through. [Failures](failures.md) says what else a failure shows, in the log and"
    yield "in metrics."
    for title, rows in GROUPS.items():
        yield ""
        yield f"## {title}"
        yield ""
        yield "| code | status | send it again | meaning | what to do |"
        yield "|---|---|---|---|---|"
        for row in rows:
            yield f"| `{row.code}` | {row.status} | {row.again.value} | {row.meaning} | {row.do} |"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
