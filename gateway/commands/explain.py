"""`plait explain CODE`: what the code of an error means, and what to do. It asks no gateway."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from plait.backends.error_codes import CODES, GROUPS

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("code", metavar="CODE", help="of an error, such as too_many_waiting")


def run(arguments: argparse.Namespace) -> None:
    """Print. Raises ValueError for a code that Plait does not have."""
    print("\n".join(lines(arguments.code)))


def lines(code: str) -> list[str]:
    """The lines about a code. Raises ValueError if there is none of this name."""
    row = CODES.get(code)
    if row is None:
        near = difflib.get_close_matches(code, CODES, n=1)
        meant = f" Did you mean {near[0]}?" if near else " An engine's own codes pass through: see its documentation."
        raise ValueError(f"Plait has no error code {code!r}.{meant}")
    return [
        f"{row.code}: HTTP {row.status}",
        f"  {row.meaning}",
        f"  Send it again: {row.again.value.replace('`', '')}.",
        f"  {row.do}",
    ]


def page() -> str:
    """docs/errors.md."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
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
