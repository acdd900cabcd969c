"""`plait check-config`: whether a configuration can be used; with `--probe`, whether its engines agree with it."""

from __future__ import annotations

import argparse
import asyncio

from plait.gateway.app import Gateway
from plait.gateway.commands import given_engines, positive_number
from plait.gateway.commands.engine_table import engine_table, problem
from plait.gateway.commands.server_secret import known_secret
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.tokenizer_agreement import UNKNOWN
from plait.gateway.log.events import configure_logging

LOOK_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    given_engines.add_arguments(parser)
    parser.add_argument("--probe", action="store_true", help="ask the engines, and say in a table what agrees")
    parser.add_argument(
        "--probe-timeout-s", type=positive_number, default=10.0, metavar="S", help="for all of them (default: 10)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Read the file and all that belongs to it: tokenizers, templates, profiles, secret. Raises ValueError."""
    if arguments.probe:
        configure_logging("error", "auto")  # the table says the rest
    given = given_engines.given_engines(arguments)
    config = given.load()
    gateway = Gateway(config, None if given.path is None else known_secret(config, given.path))
    engines, models = len(config.engines), len(config.models)
    source = given.path or "engines given"
    print(f"{source}: good, with {_count(engines, 'engine')} and {_count(models, 'configured model')}", flush=True)
    if arguments.probe:
        found = asyncio.run(_probed(gateway, arguments.probe_timeout_s))
        print(*engine_table(found), sep="\n")
        wrong = sum(problem(engine) is not None for engine in found)
        if wrong:
            raise ValueError(f"{_count(wrong, 'engine')} of {len(found)} cannot be used as configured")


async def _probed(gateway: Gateway, within_s: float) -> list[FleetEngine]:
    """The engines once each has said what it can, or after `within_s`: those of names in the DNS too."""
    engines = gateway.router.engines
    async with gateway.running():
        try:
            async with asyncio.timeout(within_s):
                while not (engines and all(map(_has_said, engines.values()))):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            pass
        return list(engines.values())


def _has_said(engine: FleetEngine) -> bool:
    """Whether an engine is out, reports with a tokenizer that was compared, or was compared by its `/tokenize`."""
    if engine.health.state is not HealthState.UP:
        return engine.health.state is HealthState.DOWN
    if engine.cache.kind is None:
        return engine.cache.reports is False and engine.compared
    return engine.cache.agreement is not UNKNOWN


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
