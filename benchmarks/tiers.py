"""A tier in host memory below the engines' KV caches, over none: `python -m benchmarks tiers`.

In virtual time, with admission and sessions as they ship: embedded engines with four times their KV in host memory, at
25 GB/s, over the same engines without, at the same calls. A placement that does not know of the tier is measured on the
same engines: it gets reports without it. Agents come in a closed loop.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp, inf, log
from pathlib import Path
from statistics import fmean
from typing import Final

import structlog

from benchmarks.filling.systems import FleetSize, simulated
from benchmarks.filling.workloads import (
    DOCUMENT_LENGTHS,
    Coming,
    Workload,
    burst,
    documents,
    mooncake,
    tools,
    video,
)
from benchmarks.holding.closed_loop import ClosedLoop
from benchmarks.holding.conditions import FULL, B
from benchmarks.mixed_prompts import LONG_FILE
from benchmarks.placing.workloads import AGENTS_FILE, loogle, mix
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.sections import AdmissionConfig
from plait.lab.simulation.claim import Claim
from plait.lab.simulation.simulate import CallRecord, SimulatedCall
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

HOST: Final = 4.0
"""Times the KV of an engine."""

SHARE: Final = 0.95
"""Of the calls a second that the engines without a tier complete if all come at once."""

WARM_UP: Final = 0.25
COMING_AND_GOING: Final = Coming(16_000, 12, DOCUMENT_LENGTHS)
SEEDS: Final = (41, 42, 43, 44, 45)
"""Nothing was tuned on these."""

LARGE: Final[Mapping[str, int | None]] = {
    "documents that come and go": 100_000,
    "video": 50_000,
    "loogle": None,
    "mooncake": None,
}
"""Workloads that are larger than all caches, and the KV of an engine; None: the profile's."""

SMALL: Final = ("tools", "documents", "burst", "mix")
"""Workloads that fit into the caches, or nearly so."""

AGENTS: Final[Mapping[str, float]] = {"agents, 1.9 x": 1.9, "agents, 7 x": 7.0}
"""Contexts of the sessions that are there at a time, over the KV of all engines."""


@dataclass(frozen=True, slots=True)
class Task:
    """A workload with one seed."""

    workload: str
    seed: int
    calls: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. The mean is that of calls, E2E, or of whole sessions. `within` is the part of the calls whose cached
    tokens were predicted within a tree block, and `in_each_tier` that where those of each tier were.
    """

    mean_s: float
    hit_rate: float
    within: float = 1.0
    in_each_tier: float = 1.0


Runs = dict[str, Figures]
"""By system: `none`, `host`, `untold`; for agents `none`, `gate`, `host`."""


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, quick="two workloads, one seed, fewer calls", seeds=SEEDS)
    made.add_argument("--only", nargs="+", metavar="WORKLOAD", help="only those whose names begin so")
    arguments = made.parse_args()
    names = [*LARGE, *SMALL, *AGENTS]
    seeds, calls = arguments.seeds, 1_600
    if arguments.quick:
        names, seeds, calls = ["loogle", "tools"], arguments.seeds[:1], 600
    if arguments.only:
        names = [name for name in names if name.startswith(tuple(arguments.only))]
    tasks = [Task(name, seed, calls) for name in names for seed in (seeds[:2] if name in AGENTS else seeds)]
    return conduct("tiers", Experiment(tasks, new_runner, report, [LONG_FILE, AGENTS_FILE]), arguments)


def new_runner(traces: Path) -> Callable[[Task], Runs]:
    """Make what runs a task."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    workloads: dict[str, Workload] = {
        "documents that come and go": partial(video, document=COMING_AND_GOING),
        "video": video,
        "loogle": loogle,
        "mooncake": partial(mooncake, traces),
        "tools": tools,
        "documents": documents,
        "burst": burst,
        "mix": mix,
    }
    return partial(_run, traces, workloads)


def _run(traces: Path, workloads: Mapping[str, Workload], task: Task) -> Runs:
    if task.workload in AGENTS:
        return _agents(traces, AGENTS[task.workload], task.seed)
    workload, fleet = workloads[task.workload], FleetSize(kv_tokens=LARGE.get(task.workload))
    _, completed_per_s = open_loop(fleet, workload(task.calls, inf, task.seed))
    coming = workload(task.calls, SHARE * completed_per_s, task.seed)
    systems = {"none": fleet, "host": replace(fleet, host=HOST), "untold": replace(fleet, host=HOST, knows_host=False)}
    return {name: open_loop(one, coming)[0] for name, one in systems.items()}


def open_loop(fleet: FleetSize, calls: Sequence[SimulatedCall]) -> tuple[Figures, float]:
    """The figures, and the calls that were completed in a second."""
    _, simulation = simulated(fleet, "plait", AHEAD_S, AdmissionConfig().max_wait_s)
    records = simulation.run(calls)
    begins_s = calls[round(WARM_UP * len(calls))].arrives_s
    counted = [record for record in records if record.arrived_s >= begins_s]
    figures = Figures(
        fmean(record.e2e_s for record in counted),
        sum(record.cached_tokens for record in counted) / sum(record.prompt_tokens for record in counted),
        fmean(_is_near(record.cached_tokens, record.predicted_cached_tokens) for record in counted),
        fmean(map(_is_near_in_each_tier, counted)),
    )
    return figures, len(records) / max(record.finished_s for record in records)


def _is_near(tokens: int, predicted: int) -> bool:
    return abs(tokens - predicted) <= TREE_BLOCK_TOKENS


def _is_near_in_each_tier(record: CallRecord) -> bool:
    device = record.cached_tokens - record.loaded_tokens
    predicted = record.predicted_cached_tokens - record.predicted_loaded_tokens
    return _is_near(device, predicted) and _is_near(record.loaded_tokens, record.predicted_loaded_tokens)


def _agents(traces: Path, share: float, seed: int) -> Runs:
    condition = replace(B, kv_tokens=round(B.kv_tokens * FULL / share))
    with_host = replace(condition, host=HOST)
    runs = {"none": (condition, False), "gate": (condition, True), "host": (with_host, True)}
    found = {name: ClosedLoop(traces, one, seed, gate=gate).run() for name, (one, gate) in runs.items()}
    return {name: Figures(one.mean_s, one.hit_rate) for name, one in found.items()}


def report(found: Mapping[Task, Runs]) -> Report:
    """A line for each workload, and the claims."""
    by_name: dict[str, list[Runs]] = {}
    for task, runs in found.items():
        by_name.setdefault(task.workload, []).append(runs)
    titles = [
        "workload",
        "mean without, s",
        "over that",
        "hit rates",
        "untold, or the gate alone",
        "predicted",
        "in each tier",
    ]
    return Report(
        lines=list(table(titles, (_cells(name, runs) for name, runs in by_name.items()))),
        claims=list(_claims(by_name)),
        results=[asdict(task) | {name: asdict(one) for name, one in runs.items()} for task, runs in found.items()],
    )


def _cells(name: str, runs: Sequence[Runs]) -> list[str]:
    other = "gate" if name in AGENTS else "untold"
    hits = (fmean(one[system].hit_rate for one in runs) for system in ("none", "host"))
    return [
        name,
        f"{fmean(one['none'].mean_s for one in runs):.2f}",
        f"{_ratio(runs, 'host', 'none'):.3f}",
        ", ".join(f"{hit:.2f}" for hit in hits),
        f"{_ratio(runs, other, 'none'):.3f}",
        f"{fmean(one['host'].within for one in runs):.3f}",
        f"{fmean(one['host'].in_each_tier for one in runs):.3f}",
    ]


def _claims(by_name: Mapping[str, Sequence[Runs]]) -> Iterator[Claim]:
    large = [_ratio(runs, "host", "none") for name, runs in by_name.items() if name in LARGE]
    if len(large) == len(LARGE):
        yield Claim("mean E2E with a tier, geometric mean of the large workloads", _geometric(large), most=0.45)
    for name, runs in by_name.items():
        if name in AGENTS:
            continue
        yield Claim("mean E2E with a tier", _ratio(runs, "host", "none"), most=1.01, where=name)
        yield Claim("predicted within a block", fmean(one["host"].within for one in runs), least=0.97, where=name)
    for name, (base, most) in {"agents, 1.9 x": ("none", 0.55), "agents, 7 x": ("gate", 0.85)}.items():
        if name in by_name:
            yield Claim(f"sessions' time over {base}", _ratio(by_name[name], "host", base), most=most, where=name)


def _ratio(runs: Sequence[Runs], system: str, base: str) -> float:
    return _geometric([one[system].mean_s / one[base].mean_s for one in runs])


def _geometric(ratios: Sequence[float]) -> float:
    return exp(fmean(map(log, ratios)))


if __name__ == "__main__":
    sys.exit(main())
