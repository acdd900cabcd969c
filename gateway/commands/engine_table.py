"""What engines say of themselves, beside what the gateway has: the table of `plait check-config --probe`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plait.gateway.fleet.engine import FleetEngine, degradation
from plait.gateway.fleet.health import HealthState

COLUMNS = ("ENGINE", "ANSWERS", "KEY", "MODELS", "CONTEXT", "TOKENIZER", "TEMPLATE", "CACHE")
_UNKNOWN = "-"
_REFUSED_KEY = "refused_key"


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
        return engine.last_error or "no answer"
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
        return "differs", "differs" if "a chat" in engine.mismatches["tokenizer"] else _UNKNOWN
    if engine.cache.kind is None:
        return _UNKNOWN, _UNKNOWN
    agreement = engine.cache.agreement
    return ("agrees" if agreement.prompts or agreement.problem is None else "differs"), (
        "agrees" if agreement.chats or agreement.problem is None else "differs"
    )
