"""`plait check-config`: checks a configuration; with `--probe`, also whether the engines agree with it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence

from plait.gateway.app import Gateway
from plait.gateway.calls.model_tokenizers import ModelTokenizers
from plait.gateway.commands import given_engines, positive_number
from plait.gateway.commands.serve import check_store
from plait.gateway.commands.server_secret import known_secret
from plait.gateway.config.sections import ModelConfig
from plait.gateway.config.values import shown
from plait.gateway.fleet.engine import FleetEngine, degradation
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.tokenizer_agreement import UNKNOWN
from plait.gateway.log.events import configure_logging
from plait.gateway.server.listening import bound_sockets

COLUMNS = ("ENGINE", "ANSWERS", "KEY", "MODELS", "CONTEXT", "TOKENIZER", "TEMPLATE", "CACHE")
TOKENIZER_COLUMNS = ("MODEL", "TOKENIZER", "STATE")
_UNKNOWN = "-"
_COUNTED = "not compared"  # the gateway has no exact tokenizer for the engine's models
_REFUSED_KEY = "refused_key"
LOOK_S = 0.05
"""The polling period of a probe."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    lines = [columns, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def engine_table(engines: Sequence[FleetEngine], tokenizers: ModelTokenizers) -> Iterator[str]:
    """The lines of the table: the header, one for each engine, and then one for each engine that has a problem."""
    yield from table(COLUMNS, (_row(engine, tokenizers) for engine in engines))
    for engine in engines:
        found = problem(engine)
        if found is not None:
            yield f"{engine.view.engine_id}: {found}"


def tokenizer_table(models: Iterable[str], tokenizers: ModelTokenizers) -> Iterator[str]:
    """The lines of the table: the header, and one for each base model's tokenizer."""
    return table(TOKENIZER_COLUMNS, ((model, *_tokenizer(model, tokenizers)) for model in models))


def _tokenizer(model: str, tokenizers: ModelTokenizers) -> tuple[str, str]:
    name = tokenizers.specification(model)
    if model in tokenizers.awaited:
        return name, "not downloaded: tokens are estimated"
    if tokenizers.lacks(model):
        return name, "none found: tokens are estimated"
    return name, "loaded" if tokenizers.exact(model) is not None else "counts only: engines get texts"


def missing(tokenizers: ModelTokenizers, within_s: float) -> Iterator[str]:
    """A line for each tokenizer that could not be downloaded: the download's error, or the time that it had."""
    for model, (name, said) in tokenizers.awaited.items():
        yield f"{model}: {said or f'the Hugging Face hub has not given tokenizer {name!r} within {within_s:g} s'}"


def problem(engine: FleetEngine) -> str | None:
    """Why an engine cannot be used as configured; None: it can."""
    if engine.health.state is not HealthState.UP:
        return engine.whole_error or "no answer"
    return degradation(engine)


def useless(models: Sequence[ModelConfig]) -> Iterator[str]:
    """A line for each fallback that can never answer, or that leads back to its model."""
    fallbacks = {model.name: model.fallbacks for model in models}
    aliases = {alias: model.name for model in models for alias in model.aliases}
    for number, model in enumerate(models):
        for place, name in enumerate(model.fallbacks):
            row = f"models[{number}].fallbacks[{place}] = {shown(name)}"
            if name in aliases:
                yield f"{row}: an alias never answers for another model; name {aliases[name]}"
            walked, behind = set[str](), [name]
            while behind:
                other = behind.pop()
                walked.add(other)
                behind += set(fallbacks.get(other, ())) - walked
            if model.name in walked:
                yield f"{row}: a loop, as {name} falls back to {model.name}; take one of the two out"


def not_offered(models: Sequence[ModelConfig], engines: Sequence[FleetEngine]) -> Iterator[str]:
    """A line for each name in `[[models]]` that no engine serves."""
    if not engines:
        yield "services: none of the names has an address, so there is no engine"
    offered = {name for engine in engines if engine.health.state is HealthState.UP for name in engine.offer.models}
    for number, model in enumerate(models):
        for key, name in (("name", model.name), *(("fallbacks", name) for name in model.fallbacks)):
            if offered and name not in offered:
                has = ", ".join(sorted(offered))
                yield f"models[{number}].{key} has {shown(name)}, which no engine that answers has; they have {has}"


def _row(engine: FleetEngine, tokenizers: ModelTokenizers) -> tuple[str, ...]:
    name, is_up = engine.view.engine_id, engine.health.state is HealthState.UP
    if not is_up:
        refused = engine.health.cause == _REFUSED_KEY
        return (name, "yes" if refused else "no", "refused" if refused else _UNKNOWN, *[_UNKNOWN] * 5)
    offer, cache = engine.offer, engine.cache
    contexts = {str(tokens) for tokens in offer.models.values() if tokens is not None}
    tokenizer, template = _agreement(engine, tokenizers)
    return (
        name, "yes", "taken", ", ".join(sorted(offer.models)) or _UNKNOWN, ", ".join(sorted(contexts)) or _UNKNOWN,
        tokenizer, template, "reported" if cache.reports else "estimated",
    )  # fmt: skip


def _agreement(engine: FleetEngine, tokenizers: ModelTokenizers) -> tuple[str, str]:
    """The cells TOKENIZER and TEMPLATE: whether the engine's are the gateway's, as far as the engine tells."""
    if "tokenizer" in engine.mismatches:
        return "differs", "differs" if "a chat" in str(engine.mismatches["tokenizer"]) else _UNKNOWN
    if engine.cache.kind is None:
        return _UNKNOWN, _UNKNOWN
    offer, agreement = engine.offer, engine.cache.agreement
    if not any(tokenizers.exact(model) for model in offer.models.keys() - offer.adapters.keys()):
        return _COUNTED, _COUNTED
    return ("agrees" if agreement.prompts or agreement.problem is None else "differs"), (
        "agrees" if agreement.chats or agreement.problem is None else "differs"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    given_engines.add_arguments(parser)
    parser.add_argument("--probe", action="store_true", help="ask the engines, and say in a table what agrees")
    parser.add_argument(
        "--probe-timeout-s",
        type=positive_number,
        default=5.0,
        metavar="S",
        help="for all of them, and for downloads of tokenizers (default: 5)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Read the file and what it needs: tokenizers, templates, profiles, the secret. Raises ValueError for problems."""
    if arguments.probe:
        configure_logging("error", "auto")  # warnings would repeat the table
    given = given_engines.given_engines(arguments)
    config = given.load()
    gateway = Gateway(config, None if given.path is None else known_secret(config, given.path))
    check_store(config, config.server.workers)
    within_s, problems, late = arguments.probe_timeout_s, list(useless(config.models)), list[str]()
    if arguments.probe:
        for listening in bound_sockets(config.server.host, 0):
            listening.close()
        found, late = asyncio.run(_probed(gateway, within_s))
        print(*engine_table(found, gateway.kernel.tokenizers), sep="\n")
        for name in late:
            print(f"{name}: not all was compared within {within_s:g} s: see --probe-timeout-s")
        print(*tokenizer_table(_base_models(gateway), gateway.kernel.tokenizers), sep="\n")
        wrong = sum(problem(engine) is not None for engine in found)
        problems += [f"{_count(wrong, 'engine')} of {len(found)} cannot be used as configured"] if wrong else []
        problems += not_offered(config.models, found)
    else:
        asyncio.run(gateway.kernel.downloads.try_all(within_s))
    problems += missing(gateway.kernel.tokenizers, within_s)
    if problems:
        raise ValueError("\n".join(problems))
    engines, models = len(config.engines), len(config.models)
    source = given.path or "engines given"
    good = "good as far as compared" if late else "good"
    print(f"{source}: {good}, with {_count(engines, 'engine')} and {_count(models, 'configured model')}")


async def _probed(gateway: Gateway, within_s: float) -> tuple[list[FleetEngine], list[str]]:
    """Run the gateway until each engine has been probed and each download tried, for `within_s` at most.

    Returns the engines, with those that the gateway has found by DNS, and the names of those that answer and whose
    probe is not over.
    """
    engines, awaited = gateway.kernel.router.engines, gateway.kernel.tokenizers.awaited
    looked_at, unexplained = gateway.kernel.router.comparisons.looked_at, gateway.kernel.monitor.unexplained

    def silent() -> list[str]:
        return [name for name, engine in engines.items() if not _has_said(engine, looked_at, unexplained)]

    async with gateway.running():
        try:
            async with asyncio.timeout(within_s):
                while silent() or not engines:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
                while any(one.problem is None for one in awaited.values()):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return list(engines.values()), [name for name in silent() if engines[name].health.state is HealthState.UP]
        return list(engines.values()), []


def _base_models(gateway: Gateway) -> list[str]:
    """The models that need a tokenizer: the configured ones, and the base models that engines serve."""
    models = gateway.kernel.router.models
    return sorted({model.name for model in gateway.config.models} | {models.base(name) for name in models.names})


def _has_said(engine: FleetEngine, looked_at: Collection[str], unexplained: Collection[str]) -> bool:
    """Whether the probe of an engine is over.

    The probe is over if the engine is down, and it is not `unexplained`. Else a load balancer was looked for, and with
    an adapter the reported tokenizer was compared with the gateway's; without one, the ids of `/tokenize` were.
    """
    if engine.health.state is not HealthState.UP:
        return engine.health.state is HealthState.DOWN and engine.address not in unexplained
    if engine.address not in looked_at:
        return False
    if engine.cache.kind is None:
        return engine.cache.reports is False and engine.compared
    return engine.cache.agreement is not UNKNOWN


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
