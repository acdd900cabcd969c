"""`plait demo`: runs a fleet to try. With `--compare` it measures what placement saves."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plait.backends.profiles import load_profile
from plait.gateway.commands import positive, positive_number
from plait.gateway.simulation.compare import (
    Experiment,
    Progress,
    Workload,
    arrival_times,
    prepare,
    saturation_rate,
    simulate,
    summarise,
)
from plait.gateway.simulation.comparison_report import Report
from plait.gateway.simulation.live import send_workload
from plait.gateway.simulation.processes import FleetPlan, running_fleet
from plait.gateway.simulation.simulated_call import CallRecord

DEFAULTS = Experiment()

INVITATION = """
Plait runs on {url} over {engines} emulated engines: text is made up, timing follows the profile {profile}.
Paste into Python:

    from openai import OpenAI
    client = OpenAI(base_url="{url}/v1", api_key="none")
    print(client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello"}}]))

or into a shell:

    curl -si {url}/v1/chat/completions -H 'content-type: application/json' \\
      -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

See where calls went in the plait-* response headers, and on {url}/metrics. Stop with Ctrl-C.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--port", type=positive, default=8000, help="the gateway's port (default: %(default)s)")
    parser.add_argument(
        "--engine-port", type=positive, default=8101, help="the first engine's port (default: %(default)s)"
    )
    parser.add_argument("--profile", default=DEFAULTS.profile, help="the engines' cost profile (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=positive, help="an engine's KV cache (default: the profile's)")
    parser.add_argument("--time-scale", type=positive_number, default=1.0, help="emulated seconds per real second")
    compare = parser.add_argument_group("comparison of placement policies on shared-prefix prompts")
    compare.add_argument("--compare", action="store_true", help="replay prompts through each policy and print a table")
    compare.add_argument(
        "--traces", type=Path, metavar="DIR", help="a folder with toolbench/ and loogle/ (default: built-in prompts)"
    )
    compare.add_argument(
        "--policies", default=",".join(DEFAULTS.policies), help="separated by commas (default: %(default)s)"
    )
    compare.add_argument("--calls", type=positive, default=DEFAULTS.calls, help="how many (default: %(default)s)")
    compare.add_argument("--seed", type=int, default=DEFAULTS.seed, help="the workload's (default: %(default)s)")
    compare.add_argument(
        "--rate",
        type=positive_number,
        default=DEFAULTS.rate,
        help="calls per second, as a share of round robin's saturation (default: %(default)s)",
    )
    compare.add_argument("--no-admission", dest="admission", action="store_false", help="send calls as they arrive")
    compare.add_argument("--real-time", action="store_true", help="run real servers instead of virtual time")
    compare.add_argument("--json", type=Path, metavar="PATH", help="also write the report to this file")


def run(arguments: argparse.Namespace) -> None:
    """Run the demo until stopped, or the comparison to its end. Raises ValueError for invalid arguments."""
    plan = FleetPlan(
        port=arguments.port,
        engine_port=arguments.engine_port,
        profile=arguments.profile,
        kv_tokens=arguments.kv_tokens or load_profile(arguments.profile).kv.tokens,
        time_scale=arguments.time_scale,
    )
    if not arguments.compare:
        run_demo(plan)
        return
    experiment = Experiment(
        traces=arguments.traces,
        policies=tuple(arguments.policies.split(",")),
        calls=arguments.calls,
        seed=arguments.seed,
        profile=arguments.profile,
        kv_tokens=arguments.kv_tokens,
        rate=arguments.rate,
        admission=arguments.admission,
    )
    run_comparison(experiment, plan if arguments.real_time else None, arguments.json)


def run_demo(plan: FleetPlan) -> None:
    """Start everything, say how to use it, and wait to be interrupted or terminated."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: stop.set())
    with running_fleet(plan):
        print(INVITATION.format(url=plan.url, engines=plan.engines, profile=plan.profile, model=plan.model), flush=True)
        try:
            stop.wait()
        except KeyboardInterrupt:
            print("stopping", flush=True)


def run_comparison(experiment: Experiment, plan: FleetPlan | None, json_path: Path | None) -> None:
    """Replay the workload through every policy and print the table. If `json_path` is given, write the report there.

    Without `plan`, time is virtual. With it, its real servers are started for each policy, with cold caches.
    """
    progress = _progress_line if sys.stderr.isatty() else _no_progress
    workload = prepare(experiment, progress)
    saturation_per_s = saturation_rate(experiment, workload, progress)
    outcomes = []
    for policy in experiment.policies:
        rate_per_s = experiment.rate * saturation_per_s
        if plan is None:
            records = simulate(experiment, workload, policy, rate_per_s, progress)
        else:
            fleet = _fleet(plan, policy, experiment, workload)
            records = _live(fleet, workload, arrival_times(experiment, rate_per_s), progress)
        outcomes.append(summarise(policy, records))
    report = Report(experiment, workload, saturation_per_s, tuple(outcomes), real_time=plan is not None)
    print(report.text())
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(report.json())


def _fleet(plan: FleetPlan, policy: str, experiment: Experiment, workload: Workload) -> FleetPlan:
    return replace(
        plan,
        engines=experiment.engines,
        policy=policy,
        profile=experiment.profile,
        kv_tokens=workload.kv_tokens,
        block_tokens=experiment.block_tokens,
    )


def _live(fleet: FleetPlan, workload: Workload, arrivals_s: Sequence[float], progress: Progress) -> list[CallRecord]:
    def on_finished(finished: int) -> None:
        progress(f"{fleet.policy}, real servers", finished, len(arrivals_s))

    with running_fleet(fleet):
        return asyncio.run(send_workload(fleet, workload.calls, arrivals_s, on_finished))


def _progress_line(label: str, done: int, total: int) -> None:
    if done % max(1, total // 200) == 0 or done == total:
        bar = "#" * (30 * done // total)
        sys.stderr.write(f"\r{label:<40} [{bar:<30}] {done}/{total}" + ("\r\x1b[K" if done == total else ""))
        sys.stderr.flush()


def _no_progress(label: str, done: int, total: int) -> None:
    if done == total:
        sys.stderr.write(f"{label}: {total} calls\n")
