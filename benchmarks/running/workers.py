"""Tasks in several processes, each of which reads the data of an experiment once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_run: Callable[[Any], Any] | None = None


def run_all(
    make_runner: Callable[[Path], Callable[[Task], Result]], traces: Path, tasks: Sequence[Task], jobs: int
) -> Iterator[tuple[Task, Result]]:
    """Each task with its result, as they are done; `make_runner` reads what it needs from `traces`.

    With one job everything runs here, in the order of `tasks`.
    """
    if jobs <= 1:
        runner = make_runner(traces)
        yield from ((task, runner(task)) for task in tasks)
        return
    with get_context("spawn").Pool(jobs, _start, (make_runner, traces)) as pool:
        yield from pool.imap_unordered(_work, tasks)


def _start(make_runner: Callable[[Path], Callable[[Any], Any]], traces: Path) -> None:
    global _run  # noqa: PLW0603 - a worker process keeps what it has read
    _run = make_runner(traces)


def _work(task: Any) -> tuple[Any, Any]:
    assert _run is not None
    return task, _run(task)
