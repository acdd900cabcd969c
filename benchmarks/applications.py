"""Applications of several LLM calls, in virtual time on real engine cores: run by the gateway or by their clients.

`python -m benchmarks applications [--quick] [--json PATH] [--plots DIR] [--jobs N] [--traces DIR] [--only NAME ...]`:
chain and map-reduce summaries, a multi-agent workflow, chat beside summaries, assistants with long system prompts;
the real router, executor and engine cores against client-side chaining on the same engines. Prints Markdown; the same
seeds give the same figures.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.application.claims import claims, speedup
from benchmarks.application.clients import NETWORK_S
from benchmarks.application.experiments import EXPERIMENTS, TRACE_FILES
from benchmarks.application.figures import Figures
from benchmarks.application.plots import plot
from benchmarks.application.report import markdown
from benchmarks.application.sweep import SUSTAINED_TOKEN_S, Point, Results, Runner, Task
from benchmarks.application.systems import LATENCY_TOKENS, OURS, SHIPPED_POLICY
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, merged
from plait.backends.profiles import load_profile

SYSTEMS = {
    "plait": f"ours: the gateway chains; engines' scheduler slo, placement {SHIPPED_POLICY}",
    "plait_fcfs": "the gateway chains as ours; the rest as throughput: what chaining alone brings",
    "latency": f"client-side chaining, FCFS with at most {LATENCY_TOKENS:,} running tokens, least outstanding calls",
    "throughput": "client-side chaining, FCFS limited by the KV cache only, least outstanding calls",
    "latency_uncached": "latency without prefix caching",
    "throughput_uncached": "throughput without prefix caching",
    "client_e2": "client-side chaining, FCFS, placement e2",
    "client_plait": f"client-side chaining, FCFS, placement {SHIPPED_POLICY}",
    "plait_undeduced": "the gateway chains as ours, but is not told what the values are wanted for",
}


def main() -> int:
    """Run the experiments, print them, write what was asked for; returns 1 if a claim fails."""
    made = parser(__doc__, quick="few points and one seed: under a minute on one core", plots=True)
    made.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS), metavar="NAME",
                      help=f"of {', '.join(EXPERIMENTS)}")  # fmt: skip
    arguments = made.parse_args()
    tasks = _tasks(arguments.only, quick=arguments.quick)
    return conduct("applications", Experiment(tasks, Runner, _report, TRACE_FILES), arguments)


def _tasks(names: Sequence[str], *, quick: bool) -> list[Task]:
    """Every case of the experiments under each of their systems."""
    return [
        (case, system, tuple(range(1 if quick else EXPERIMENTS[name].seeds)))
        for name in names
        for case in EXPERIMENTS[name].cases(name, quick=quick)
        for system in EXPERIMENTS[name].systems
    ]


def _report(found: Mapping[Task, Results]) -> Report:
    results = merged(found)
    return Report(
        lines=list(markdown(results)),
        claims=claims(results),
        results=[{**_row(results, point), **_shown(figures)} for point, figures in results.items()],
        inputs=_inputs([*found]),
        plot=partial(plot, results),
    )


def _shown(figures: Figures) -> dict[str, Any]:
    """All but the latency of each job."""
    return {name: value for name, value in asdict(figures).items() if name != "latencies_s"}


def _inputs(tasks: Sequence[Task]) -> dict[str, Any]:
    """What the figures depend on."""
    names = list(dict.fromkeys(case.experiment for case, _, _ in tasks))
    profiles = dict.fromkeys(EXPERIMENTS[name].machine.profile for name in names)
    return {
        "traces": list(TRACE_FILES),
        "network_s": NETWORK_S,
        "network": "a request's way and its answer's, half each; ours pays it once a program",
        "systems": SYSTEMS,
        "sustained": f"mean latency an output token within {SUSTAINED_TOKEN_S} s",
        "experiments": {
            name: {"machine": asdict(EXPERIMENTS[name].machine), "settings": asdict(EXPERIMENTS[name].settings)}
            for name in names
        },
        "seeds": {name: next(len(seeds) for case, _, seeds in tasks if case.experiment == name) for name in names},
        "profiles": {
            name: {"model": source.model, "accelerator": source.accelerator, "extrapolated": source.extrapolated}
            for name in profiles
            for source in (load_profile(name).source,)
        },
    }


def _row(results: Results, point: Point) -> dict[str, Any]:
    better = None if point.system == OURS else speedup(results, Point(point.case, OURS, point.kind), point.system)
    return {**asdict(point.case), "system": point.system, "kind": point.kind, "ours_better": better}


if __name__ == "__main__":
    sys.exit(main())
