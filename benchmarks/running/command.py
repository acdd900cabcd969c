"""The command of a benchmark: the options that all have, and the run of an experiment in virtual time."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.running.kept import Kept
from benchmarks.running.progress import Progress
from benchmarks.running.report import Report, finish
from benchmarks.running.workers import run_all
from e2e.traces import ABSENT, TRACES

TaskT = TypeVar("TaskT")
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True)
class Experiment(Generic[TaskT, FoundT]):
    """An experiment that runs in virtual time: independent tasks, each the same whenever and wherever it runs.

    `new_runner` makes what runs a task, once in each process, from the folder of the traces. `report` gets all results
    in the order of the tasks. `files` of that folder have to be there.
    """

    tasks: Sequence[TaskT]
    new_runner: Callable[[Path], Callable[[TaskT], FoundT]]
    report: Callable[[Mapping[TaskT, FoundT]], Report]
    files: Sequence[str] = ()


def parser(
    doc: str | None, *, quick: str = "", seeds: Sequence[int] = (), plots: bool = False
) -> argparse.ArgumentParser:
    """The options of a benchmark in virtual time; the first line of `doc` says what it is for.

    There is a `--quick` if there is something to say of it, and `--seeds` if there are any.
    """
    made = timed_parser(doc)
    made.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="default: %(default)s")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    made.add_argument("--results", type=Path, metavar="FILE", help="keep finished tasks there, and go on from them")
    if quick:
        made.add_argument("--quick", action="store_true", help=quick)
    if seeds:
        made.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="default: %(default)s")
    if plots:
        made.add_argument("--plots", type=Path, metavar="DIR", help="draw the figures there (needs matplotlib)")
    return made


def timed_parser(doc: str | None, *, rounds: int = 0) -> argparse.ArgumentParser:
    """The options of a benchmark that measures this machine, with so many `--rounds`, if any."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--json", type=Path, metavar="PATH", help="write the report there")
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    return made


def conduct(name: str, experiment: Experiment[TaskT, FoundT], arguments: argparse.Namespace) -> int:
    """Run all tasks, report; returns 1 if a claim fails. Without its traces, an experiment is skipped."""
    if missing := [file for file in experiment.files if not (arguments.traces / file).exists()]:
        print(f"skipped: no {' and no '.join(missing)} in {arguments.traces}; {ABSENT}")
        return 0
    return finish(name, experiment.report(results(experiment, arguments)), arguments)


def results(experiment: Experiment[TaskT, FoundT], arguments: argparse.Namespace) -> dict[TaskT, FoundT]:
    """The result of each task. Those that `--results` has are not run again."""
    made_with = re.sub(r" at 0x[0-9a-f]+", "", repr(experiment.new_runner))
    kept: Kept[TaskT, FoundT] = Kept(arguments.results, made_with)
    found = kept.read()
    left = [task for task in experiment.tasks if task not in found]
    progress = Progress(len(left))
    for task, result in run_all(experiment.new_runner, arguments.traces, left, arguments.jobs):
        kept.add(task, result)
        found[task] = result
        progress.advance()
    return {task: found[task] for task in experiment.tasks}
