"""The progress of a long command on stderr: a bar on a terminal, else a line for each part that is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called with a part's label, how much of it is done, and how much there is of it."""

STEPS = 100
"""A part moves the bar at most so often."""


@contextmanager
def progress_of(parts: int) -> Iterator[Progress]:
    """Shows the progress of so many equal parts, which come one after another."""
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = TextColumn("{task.description:<40}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=parts)
        ended = 0

        def show(label: str, done: int, total: int) -> None:
            nonlocal ended
            if done % max(1, total // STEPS) == 0 or done == total:
                bar.update(task, description=label, completed=ended + done / total)
            ended += done == total

        yield show


def _line(label: str, done: int, total: int) -> None:
    if done == total:
        sys.stderr.write(f"{label}: {total} calls\n")
