"""What a benchmark says at its end: Markdown, claims, the JSON of `--json`, and figures."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite
from os import cpu_count
from pathlib import Path
from typing import Any, Final, TypeVar

from plait.lab.simulation.claim import Claim

PointT = TypeVar("PointT")
FiguresT = TypeVar("FiguresT")

NOT_INPUTS: Final = ("json", "plots", "results", "traces", "jobs")
"""Options that change no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a benchmark.

    `lines` are Markdown, without the claims. `results` are rows for JSON, `inputs` what they depend on beside the
    options. `plot` draws figures in a folder and returns their files. The figures of a benchmark that `is_timed` depend
    on the machine, so its JSON says which, and when.
    """

    lines: Sequence[str]
    claims: Sequence[Claim]
    results: Sequence[Mapping[str, Any]] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    plot: Callable[[Path], Iterable[Path]] | None = None
    is_timed: bool = False


def finish(name: str, report: Report, arguments: argparse.Namespace) -> int:
    """Print a report and write what was asked for; returns 1 if a claim fails, else 0."""
    claims = [f"- {claim}" for claim in report.claims]
    print("\n".join([*report.lines, *([""] if report.lines and claims else []), *claims]))
    if arguments.json is not None:
        write(arguments.json, as_json(name, report, arguments))
    plots = getattr(arguments, "plots", None)
    if plots is not None and report.plot is not None:
        print("\n".join(f"wrote {path}" for path in report.plot(plots)))
    return int(any(claim.fails for claim in report.claims))


def as_json(name: str, report: Report, arguments: argparse.Namespace) -> dict[str, Any]:
    """The report for JSON. What is infinite, or no number, is null."""
    options = {key: value for key, value in vars(arguments).items() if key not in NOT_INPUTS}
    timed = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine()} if report.is_timed else {}
    whole = {
        "experiment": name,
        "command": shlex.join(["python", "-m", "benchmarks", name, *_given(sys.argv[1:])]),
        **timed,
        "inputs": options | dict(report.inputs),
        "results": list(report.results),
        "claims": [claim.json() for claim in report.claims],
    }
    finite: dict[str, Any] = _finite(whole)
    return finite


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


def machine() -> str:
    """The processor and how many of its cores there are."""
    names = {line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")}
    return f"{cpu_count()} cores, {next(iter(names), platform.machine())}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def merged(found: Mapping[Any, Mapping[PointT, FiguresT]]) -> dict[PointT, FiguresT]:
    """The figures of all points, of tasks that have some each, in the order of the tasks."""
    return {point: figures for some in found.values() for point, figures in some.items()}


def _given(arguments: Sequence[str]) -> Iterator[str]:
    """The options of a command line that change figures."""
    dropped = False
    for argument in arguments:
        if argument.startswith("--"):
            dropped = argument.lstrip("-").partition("=")[0] in NOT_INPUTS
        if not dropped:
            yield argument


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(one) for one in value]
    return value


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
