"""`plait demo`: runs a gateway over emulated engines. With `--compare`, compares placement policies."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from plait.backends.profiles import load_profile
from plait.gateway.commands import port, positive, positive_number
from plait.gateway.commands.asked_gateway import AskedGateway
from plait.gateway.commands.screen import Screen
from plait.gateway.commands.top import follow, has_screen
from plait.gateway.log.events import configure_logging
from plait.lab.simulation.compare import (
    OURS,
    Experiment,
    Outcome,
    Progress,
    Report,
    Workload,
    after_warm_up,
    arrival_times,
    prepare,
    saturation_rate,
    simulate,
    summarise,
)
from plait.lab.simulation.endless_load import DEFAULT_CALLS_PER_S, running_load
from plait.lab.simulation.processes import FleetPlan, running_fleet, send_workload
from plait.lab.simulation.rivals import KNOWN, RIVALS
from plait.lab.simulation.simulate import CallRecord

DEFAULTS = Experiment()
QUICK_CALLS = 800
TURNS = 3

INVITATION = """
Plait runs on {url} over {engines} emulated engines: text is made up, timing follows the profile {profile}.
Paste into Python:

    from openai import OpenAI
    client = OpenAI(base_url="{url}/v1", api_key="none")
    print(client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello"}}]))

or into a shell:

    curl -si {url}/v1/chat/completions -H 'content-type: application/json' \\
      -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

Watch the engines and the calls in a browser, or in another terminal:

    {url}/#key={key}
    plait top {url} --key {key}

See where calls went in the plait-* response headers, and on {url}/metrics. Stop with Ctrl-C.
"""

HINT = """ none so far. From another terminal:

    curl -si {url}/v1/chat/completions -H 'content-type: application/json' \\
      -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

 or start with `plait demo --load`, which sends calls by itself.
"""

LATE = "this machine is too slow or too busy for the whole load: fewer calls are sent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=port, default=8000, help="the gateway's port (default: %(default)s)")
    parser.add_argument("--engine-port", type=port, default=8101, help="the first engine's port (default: %(default)s)")
    parser.add_argument("--profile", default=DEFAULTS.profile, help="the engines' cost profile (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=positive, help="an engine's KV cache (default: the profile's)")
    parser.add_argument("--time-scale", type=positive_number, default=1.0, help="emulated seconds per real second")
    parser.add_argument(
        "--load",
        type=positive_number,
        nargs="?",
        const=DEFAULT_CALLS_PER_S,
        metavar="CALLS/S",
        help=f"send a built-in load to watch, of so many calls a second (default: {DEFAULT_CALLS_PER_S:g})",
    )
    _add_comparison(parser.add_argument_group("comparison of placement policies on sessions that share prefixes"))


def _add_comparison(compare: argparse._ArgumentGroup) -> None:
    compare.add_argument("--compare", action="store_true", help="the same calls through each policy, and a table")
    compare.add_argument("--quick", action="store_true", help=f"{QUICK_CALLS} calls")
    compare.add_argument("--calls", type=positive, help=f"how many (default: {DEFAULTS.calls})")
    compare.add_argument(
        "--traces", type=Path, metavar="DIR", help="a folder with toolbench/ and loogle/ (default: built-in prompts)"
    )
    compare.add_argument(
        "--policies",
        help=f"any of {', '.join(KNOWN)} and package.module:name of your own, separated by commas (default: "
        f"{','.join(DEFAULTS.policies)}; with --real-time those of them that the gateway has)",
    )
    compare.add_argument("--seed", type=int, default=DEFAULTS.seed, help="the workload's (default: %(default)s)")
    compare.add_argument(
        "--rate",
        type=positive_number,
        default=DEFAULTS.rate,
        help=f"calls per second, as a share of what {OURS} completes if all come at once (default: %(default)s)",
    )
    compare.add_argument("--no-admission", dest="admission", action="store_false", help="send calls as they arrive")
    compare.add_argument("--real-time", action="store_true", help="run real servers instead of virtual time")
    compare.add_argument("--json", type=Path, metavar="PATH", help="also write the report to this file")
    compare.add_argument("--markdown", action="store_true", help="print a short table in Markdown")


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
        run_demo(plan, load_per_s=arguments.load)
        return
    experiment = Experiment(
        traces=arguments.traces,
        policies=_policies(arguments.policies, real_time=arguments.real_time),
        calls=arguments.calls or (QUICK_CALLS if arguments.quick else DEFAULTS.calls),
        turns=TURNS,
        seed=arguments.seed,
        profile=arguments.profile,
        kv_tokens=arguments.kv_tokens,
        rate=arguments.rate,
        admission=arguments.admission,
    )
    configure_logging("warning", "auto")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = compared(experiment, plan if arguments.real_time else None)
    print(report.markdown() if arguments.markdown else report.text())
    if arguments.json is not None:
        arguments.json.write_bytes(report.json())


def _policies(named: str | None, *, real_time: bool) -> tuple[str, ...]:
    """The policies to compare. In real time the gateway runs them: one that it does not have raises ValueError."""
    if named is None:
        return tuple(policy for policy in DEFAULTS.policies if not real_time or policy not in RIVALS)
    policies = tuple(named.split(","))
    rivals = [policy for policy in policies if policy in RIVALS]
    if real_time and rivals:
        raise ValueError(f"the gateway does not have the policy {rivals[0]!r}: leave --real-time out")
    return policies


def run_demo(plan: FleetPlan, *, load_per_s: float | None) -> None:
    """Start the engines and the gateway, print how to use them, and show the calls until SIGINT or SIGTERM.

    A terminal shows the screen of `plait top`. Otherwise the gateway's log shows a line for each call.
    """
    stop, on_screen = threading.Event(), has_screen()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: stop.set())
    plan = replace(plan, admin_key=secrets.token_hex(12), log_level="warning" if on_screen else "info")
    screen = Screen(f"{plan.url}/#key={plan.admin_key}", HINT.format(url=plan.url, model=plan.model))

    def say_late() -> None:
        if on_screen:
            screen.title = f"{screen.title}  {LATE}"
        else:
            print(LATE, flush=True)

    try:
        with (
            _stderr_of_servers(beside_screen=on_screen) as stderr,
            running_fleet(plan, stderr),
            running_load(plan.url, plan.model, load_per_s, on_late=say_late),
        ):
            said = INVITATION.format(
                url=plan.url, engines=plan.engines, profile=plan.profile, model=plan.model, key=plan.admin_key
            )
            print(said, flush=True)
            if on_screen:
                follow(AskedGateway(plan.url, plan.admin_key), stop, screen)
            stop.wait()
    except KeyboardInterrupt:
        print("stopping", flush=True)


@contextmanager
def _stderr_of_servers(*, beside_screen: bool) -> Iterator[IO[bytes] | None]:
    """The servers' stderr; None: this process's. Beside a screen, a file that is printed once the screen is gone."""
    if not beside_screen:
        yield None
        return
    with tempfile.TemporaryFile() as kept:
        try:
            yield kept
        finally:
            kept.seek(0)
            shutil.copyfileobj(kept, sys.stderr.buffer)


def compared(experiment: Experiment, plan: FleetPlan | None) -> Report:
    """Send the same workload through each policy.

    Without `plan`, a simulator runs in virtual time. With `plan`, real servers are started anew for each policy, so
    that their caches are cold.
    """
    with progress_of(2 + len(experiment.policies)) as progress:  # two more: tokenizing, and the saturation rate
        workload = prepare(experiment, progress)
        saturation_per_s = saturation_rate(experiment, workload, progress, OURS)
        outcomes: list[Outcome] = []
        for policy in experiment.policies:
            rate_per_s = experiment.rate * saturation_per_s
            if plan is None:
                records = simulate(experiment, workload, policy, rate_per_s, progress)
            else:
                fleet = _fleet(plan, policy, experiment, workload)
                records = _live(fleet, workload, arrival_times(experiment, workload, rate_per_s), progress)
            outcomes.append(summarise(policy, after_warm_up(records)))
    return Report(experiment, workload, saturation_per_s, tuple(outcomes), real_time=plan is not None)


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
        progress(f"{fleet.policy}, real servers", finished, len(workload.calls))

    with running_fleet(fleet):
        return asyncio.run(send_workload(fleet, workload, arrivals_s, on_finished))


STEPS = 100
"""The most updates of the progress bar in one part."""


@contextmanager
def progress_of(parts: int) -> Iterator[Progress]:
    """A progress bar on stderr for `parts` equal parts, one after another. Without a terminal, a line for each part."""
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
