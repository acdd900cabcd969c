"""Local schedulers on AccelGen's mixed prompts, in virtual time on one real embedded engine core.

`python -m benchmarks local_scheduler [--quick] [--schedulers NAME,...] [--json PATH] [--plots DIR] [--traces DIR]`:
arrival rates through saturation; baselines, Plait's scheduler with and without each of its methods, clairvoyant
schedules and a bound serve the same calls. Prints Markdown; the same seeds give the same figures but for CPU times.
With `--schedulers` only these run, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.mixed_prompts import PROFILE, Mix, MixedPrompts, missing_traces, statistics
from benchmarks.schedulers.claims import Claim, claims, knee
from benchmarks.schedulers.engine_run import BLOCK_TOKENS
from benchmarks.schedulers.plots import plot
from benchmarks.schedulers.sweep import BOUND, FULL, QUICK, Plan, Progress, Results, machine, sweep
from benchmarks.schedulers.systems import MAX_BATCH_TOKENS, OURS, systems
from e2e.traces import TRACES
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
    """Run the sweep, print it, write what was asked for; returns 1 if a claim does not hold."""
    arguments = _arguments()
    if missing := missing_traces(arguments.traces):
        print(f"skipped: no {' and no '.join(missing)} in {arguments.traces}")
        return 0
    plan = replace(QUICK if arguments.quick else FULL, calls=arguments.calls)
    points = plan.named(arguments.schedulers) if arguments.schedulers else plan.points(FEW)
    results = sweep(plan, points, arguments.traces, arguments.jobs, Progress())
    made = [] if arguments.schedulers else claims(results)
    inputs = _inputs(plan, arguments.traces)
    print(_markdown(inputs, results, made))
    if arguments.json:
        arguments.json.write_text(json.dumps(_report(inputs, results, made), indent=1) + "\n", encoding="utf-8")
    if arguments.plots:
        print("\n".join(f"wrote {path}" for path in plot(results, arguments.plots)))
    return int(not all(claim.holds for claim in made))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the figures here (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="one load, no ablations: five minutes of CPU time")
    parser.add_argument("--traces", type=Path, default=TRACES, help="default: %(default)s")
    parser.add_argument("--schedulers", type=_names, metavar="NAME,...", help="only these, and no claims")
    parser.add_argument("--calls", type=int, default=FULL.calls, help="of each run (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    return parser.parse_args()


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
        "traces": ["mooncake_conversation_trace.jsonl", "AzureLLMInferenceTrace_conv.csv"],
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


def _report(inputs: dict[str, Any], results: Results, made: Sequence[Claim]) -> dict[str, Any]:
    kinds = {name: system.kind for name, system in systems().items()}
    rows = [{**asdict(point), "kind": kinds.get(point.system, BOUND), **figures} for point, figures in results.items()]
    return {
        "experiment": "local_scheduler",
        "inputs": inputs,
        "results": rows,
        "knees": {
            tpot: {name: knee(results, tpot, name) for name in _swept(results)} for tpot in _kinds_of_tpot(results)
        },
        "claims": [asdict(claim) for claim in made],
    }


def _swept(results: Results) -> list[str]:
    return list(dict.fromkeys(point.system for point in results if point.system != BOUND))


def _kinds_of_tpot(results: Results) -> list[str]:
    return list(dict.fromkeys(point.tpot for point in results if point.figure == "rate"))


def _markdown(inputs: dict[str, Any], results: Results, made: Sequence[Claim]) -> str:
    capped = ", ".join(f"{drawn['capped_calls']:.0f} of {drawn['calls']:.0f}" for drawn in inputs["workload"])
    feasible = ", ".join(f"{drawn['feasible_share']:.2f}" for drawn in inputs["workload"])
    lines = [
        "# Local schedulers on mixed prompts",
        "",
        (
            f"Profile {inputs['profile']}, KV cache {inputs['kv_tokens']:,} tokens, iterations of at most "
            f"{inputs['max_batch_tokens']:,} new tokens. Prompts cut to fit the KV cache: {capped}. "
            f"Share of calls that an idle engine serves in time: {feasible}."
        ),
    ]
    for load in dict.fromkeys((point.figure, point.tpot, point.long_share, point.rate_per_s) for point in results):
        figure, tpot, share, rate = load
        lines += ["", f"## {rate:g} calls/s, {share:.0%} long, {tpot} TPOT ({figure})", "", *_header()]
        lines += [
            _row(point.system, figures)
            for point, figures in results.items()
            if (point.figure, point.tpot, point.long_share, point.rate_per_s) == load
        ]
    lines += ["", "## Claims", ""] if made else []
    for claim in made:
        word = "holds" if claim.holds else "FAILS"
        lines.append(f"- {word}: {claim.name}: {claim.value:.3f} (target {claim.target:g}; {claim.where})")
    return "\n".join(lines)


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
