"""`plait check-config`: whether a configuration can be used; with `--probe`, whether its engines agree with it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence

from plait.gateway.app import Gateway
from plait.gateway.commands import given_engines, positive_number
from plait.gateway.commands.server_secret import known_secret
from plait.gateway.fleet.engine import FleetEngine, degradation
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.tokenizer_agreement import UNKNOWN
from plait.gateway.log.events import configure_logging

COLUMNS = ("ENGINE", "ANSWERS", "KEY", "MODELS", "CONTEXT", "TOKENIZER", "TEMPLATE", "CACHE")
_UNKNOWN = "-"
_REFUSED_KEY = "refused_key"
LOOK_S = 0.05


def engine_table(engines: Sequence[FleetEngine]) -> Iterator[str]:
    """A line for the columns, one for each engine, and one for each problem."""
    rows = [COLUMNS, *map(_row, engines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for engine in engines:
        found = problem(engine)
        if found is not None:
            yield f"{engine.view.engine_id}: {found}"


def problem(engine: FleetEngine) -> str | None:
    """What is wrong with an engine; None if nothing is."""
    if engine.health.state is not HealthState.UP:
        return engine.whole_error or "no answer"
    return degradation(engine)


def _row(engine: FleetEngine) -> tuple[str, ...]:
    name, is_up = engine.view.engine_id, engine.health.state is HealthState.UP
    if not is_up:
        refused = engine.health.cause == _REFUSED_KEY
        return (name, "yes" if refused else "no", "refused" if refused else _UNKNOWN, *[_UNKNOWN] * 5)
    offer, cache = engine.offer, engine.cache
    contexts = {str(tokens) for tokens in offer.models.values() if tokens is not None}
    tokenizer, template = _agreement(engine)
    return (
        name, "yes", "taken", ", ".join(sorted(offer.models)) or _UNKNOWN, ", ".join(sorted(contexts)) or _UNKNOWN,
        tokenizer, template, "reported" if cache.reports else "estimated",
    )  # fmt: skip


def _agreement(engine: FleetEngine) -> tuple[str, str]:
    """Whether the tokenizer and the template are the gateway's, as far as the engine says."""
    if "tokenizer" in engine.mismatches:
        return "differs", "differs" if "a chat" in str(engine.mismatches["tokenizer"]) else _UNKNOWN
    if engine.cache.kind is None:
        return _UNKNOWN, _UNKNOWN
    agreement = engine.cache.agreement
    return ("agrees" if agreement.prompts or agreement.problem is None else "differs"), (
        "agrees" if agreement.chats or agreement.problem is None else "differs"
    )


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
