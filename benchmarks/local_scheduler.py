"""Local schedulers on AccelGen's mixed prompts, in virtual time on one real embedded engine core.

`python -m benchmarks local_scheduler [--quick] [--schedulers NAME,...]`:
arrival rates through saturation; baselines, Plait's scheduler with and without each of its methods, clairvoyant
schedules and a bound serve the same calls. Prints Markdown; the same seeds give the same figures but for CPU times.
With `--schedulers` only these run, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.mixed_prompts import PROFILE, TRACE_FILES, Mix, MixedPrompts, statistics
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report
from benchmarks.schedulers.claims import claims, knee
from benchmarks.schedulers.engine_run import BLOCK_TOKENS
from benchmarks.schedulers.plots import plot
from benchmarks.schedulers.sweep import BOUND, FULL, QUICK, Plan, Results, Runner, Task, machine, means
from benchmarks.schedulers.systems import MAX_BATCH_TOKENS, OURS, systems
from plait.backends.profiles import load_profile

FEW = ("orca", "fcfs_512", "fcfs_2048", "fastgen", OURS, "srpt", "small_chunks", "few_lost", BOUND)
"""The systems of the sensitivity figures."""

COLUMNS = {
    "throughput_calls_s": ("calls/s", 3),
    "throughput_tokens_s": ("tokens/s", 0),
    "goodput_calls_s": ("goodput", 3),
    "call_attainment": ("calls met", 3),
    "feasible_attainment": ("of feasible", 3),
    "iteration_attainment": ("iterations met", 3),
    "jct_mean_s": ("JCT s", 1),
    "jct_attainment": ("JCT met", 3),
    "compute_utilisation": ("compute", 3),
    "kv_utilisation": ("KV", 2),
    "preemptions": ("preempted", 0),
    "decision_median_ms": ("decision ms", 3),
}


def main() -> int:
    """Run the sweep, print it, write what was asked for; returns 1 if a claim fails."""
    made = parser(__doc__, quick="one load, no ablations: five minutes of CPU time", plots=True)
    made.add_argument("--schedulers", type=_names, metavar="NAME,...", help="only these, and no claims")
    made.add_argument("--calls", type=int, default=FULL.calls, help="of each run (default: %(default)s)")
    arguments = made.parse_args()
    plan = replace(QUICK if arguments.quick else FULL, calls=arguments.calls)
    points = plan.named(arguments.schedulers) if arguments.schedulers else plan.points(FEW)

    def report(found: Mapping[Task, Mapping[str, float]]) -> Report:
        results = means(found)
        inputs = _inputs(plan, arguments.traces)
        return Report(
            lines=list(_markdown(inputs, results)),
            claims=[] if arguments.schedulers else claims(results),
            results=_rows(results),
            inputs={**inputs, "knees": _knees(results)},
            plot=partial(plot, results),
        )

    return conduct("local_scheduler", Experiment(plan.tasks(points), Runner, report, TRACE_FILES), arguments)


def _names(text: str) -> list[str]:
    """Systems of the comparison, or schedulers that are registered."""
    names = text.split(",")
    if unknown := [name for name in names if name not in systems()]:
        raise argparse.ArgumentTypeError(f"no scheduler {unknown[0]!r}; there are {', '.join(systems())}")
    return names


def _inputs(plan: Plan, traces: Path) -> dict[str, Any]:
    """What the figures depend on."""
    engine = machine()
    prompts = MixedPrompts(traces, engine.cost_model, engine.kv_tokens)
    drawn = [statistics(prompts.draw(Mix(plan.calls, 1.0, seed))) for seed in plan.seeds]
    pivot = engine.cost_model.pivot()
    return {
        "traces": list(TRACE_FILES),
        "profile": PROFILE,
        "extrapolated": load_profile(PROFILE).source.extrapolated.strip(),
        "kv_tokens": engine.kv_tokens,
        "block_tokens": BLOCK_TOKENS,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "pivot_tokens": pivot.tokens if pivot else None,
        "plan": asdict(plan),
        "workload": drawn,
        "lengths": "prompts are cut to what the KV cache holds beside their output; outputs to 2,048 tokens",
        "ours": OURS,
    }


def _rows(results: Results) -> list[dict[str, Any]]:
    kinds = {name: system.kind for name, system in systems().items()}
    return [{**asdict(point), "kind": kinds.get(point.system, BOUND), **figures} for point, figures in results.items()]


def _knees(results: Results) -> dict[str, dict[str, float]]:
    swept = dict.fromkeys(point.system for point in results if point.system != BOUND)
    kinds_of_tpot = dict.fromkeys(point.tpot for point in results if point.figure == "rate")
    return {tpot: {name: knee(results, tpot, name) for name in swept} for tpot in kinds_of_tpot}


def _markdown(inputs: Mapping[str, Any], results: Results) -> Iterator[str]:
    capped = ", ".join(f"{drawn['capped_calls']:.0f} of {drawn['calls']:.0f}" for drawn in inputs["workload"])
    feasible = ", ".join(f"{drawn['feasible_share']:.2f}" for drawn in inputs["workload"])
    yield from ("# Local schedulers on mixed prompts", "")
    yield (
        f"Profile {inputs['profile']}, KV cache {inputs['kv_tokens']:,} tokens, iterations of at most "
        f"{inputs['max_batch_tokens']:,} new tokens. Prompts cut to fit the KV cache: {capped}. "
        f"Share of calls that an idle engine serves in time: {feasible}."
    )
    for load in dict.fromkeys((point.figure, point.tpot, point.long_share, point.rate_per_s) for point in results):
        figure, tpot, share, rate = load
        yield from ("", f"## {rate:g} calls/s, {share:.0%} long, {tpot} TPOT ({figure})", "", *_header())
        for point, figures in results.items():
            if (point.figure, point.tpot, point.long_share, point.rate_per_s) == load:
                yield _row(point.system, figures)


def _header() -> list[str]:
    return [
        f"| {'system':<22} |" + "".join(f" {title} |" for title, _ in COLUMNS.values()),
        "|---|" + "---:|" * len(COLUMNS),
    ]


def _row(system: str, figures: dict[str, float]) -> str:
    cells = [
        f"{figures[field]:>{len(title)},.{digits}f}" if field in figures else " " * len(title)
        for field, (title, digits) in COLUMNS.items()
    ]
    return f"| {system:<22} |" + "".join(f" {cell} |" for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
