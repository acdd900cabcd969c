"""The fleet at one moment, as watchers see it: engines, waiting calls, and the prefixes that calls share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from time import time
from typing import Final

import msgspec

from plait.gateway.admission.admission import Admission
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.metrics import knowledge_of
from plait.gateway.fleet.router import Router
from plait.gateway.guests.live.feed import Feed
from plait.policy.prefix.hot_prefixes import cached_shares, hot_prefixes, prefix_id

MOST_PREFIXES: Final = 12
MOST_ENGINES: Final = 64
MOST_HELD: Final = 8
"""The most held turns in an event."""


class EngineState(msgspec.Struct):
    name: str
    health: str
    draining: bool
    stalled: bool
    knowledge: str
    """As `metrics.knowledge_of`."""
    queued_calls: int
    """Calls in the gateway's line for the engine."""
    waiting_calls: int
    """Calls in the engine's own queue."""
    running_calls: int
    outstanding_tokens: int
    """Prompt tokens still to be computed."""
    kv_tokens: int | None
    """The size of the KV cache; None: not known."""
    kv_used_tokens: int | None
    cached_tokens: int
    """Prompt tokens that are known to be in the cache."""


class PrefixState(msgspec.Struct):
    """A shared prefix. `uses` are those of about the last minute; `engines` has the part that each has cached."""

    id: str
    tokens: int
    uses: float
    engines: dict[str, float]


class ModelState(msgspec.Struct):
    """The waiting calls and sessions of a model. `expected_s` is the predicted time until all calls are sent."""

    model: str
    waiting_calls: int
    expected_s: float
    live_sessions: int
    held_sessions: int


class HeldTurn(msgspec.Struct):
    """A call whose session waits until its context fits into the KV caches, in which others count as live."""

    model: str
    tenant: str
    tokens: int
    """Its prompt and the expected answer."""
    held_s: float
    """For how long its client has tried."""
    place: int
    """Its place among its tenant's held calls; 1: the next."""
    expected_s: float
    """The predicted time until it passes."""
    live_tokens: int
    """The tokens of live contexts, which leave no room for its own."""
    kv_tokens: int | None


class FleetNews(msgspec.Struct):
    """The event `fleet`. `engines` has those at the first `MOST_ENGINES` addresses, at most four times as many.

    `at` counts from 1970.
    """

    at: float
    calls_per_s: float
    output_tokens_per_s: float
    hit_rate: float | None
    ttft_s: float | None
    engine_count: int
    engines: list[EngineState]
    models: list[ModelState]
    prefixes: list[PrefixState]
    held: list[HeldTurn]
    keeps_receipts: bool
    """Whether calls can be opened."""


def fleet_news(router: Router, admission: Admission, feed: Feed, now_s: float) -> FleetNews:
    """Make the event. The feed then marks calls by the prefixes that were found."""
    rates = feed.rates(now_s)
    prefixes = hot_prefixes(router.tree, now_s, feed.recent, MOST_PREFIXES)
    feed.prefixes = {node.hashes[-1]: prefix_id(node) for node in prefixes}
    block_tokens, shown = router.block_tokens, chain(*islice(router.addresses.values(), MOST_ENGINES))
    return FleetNews(
        at=round(time(), 3),
        calls_per_s=round(rates.calls_per_s, 2),
        output_tokens_per_s=round(rates.output_tokens_per_s, 1),
        hit_rate=_rounded(rates.hit_rate),
        ttft_s=_rounded(rates.ttft_s),
        engine_count=len(router.engines),
        engines=[engine_state(engine, block_tokens) for engine in islice(shown, 4 * MOST_ENGINES)],
        models=_models(admission),
        prefixes=[
            PrefixState(
                prefix_id(node),
                node.end_blocks * block_tokens,
                round(node.uses(now_s), 1),
                {name: round(share, 3) for name, share in cached_shares(node).items() if name in router.engines},
            )
            for node in prefixes
        ],
        held=[*islice(_held(admission, feed.label, now_s), MOST_HELD)],
        keeps_receipts=feed.keeps_receipts,
    )


def engine_state(engine: FleetEngine, block_tokens: int) -> EngineState:
    view, report, counts = engine.view, engine.cache.last_report, engine.counts
    queued, kv_tokens = view.queue.unsent, engine.cache.told_tokens
    if report is not None:
        waiting, running = report.queue.waiting, report.queue.running
        free_tokens = engine.cache.free_tokens
        used = None if kv_tokens is None or free_tokens is None else max(0, kv_tokens - free_tokens)
    else:
        sent = max(0, view.outstanding - queued)
        running = sent if counts is None else counts.running
        waiting = max(0, sent - running) if counts is None or counts.waiting is None else counts.waiting
        used = None
    return EngineState(
        name=view.engine_id,
        health=engine.health.state.value,
        draining=engine.draining,
        stalled=engine.stalled,
        knowledge=knowledge_of(engine),
        queued_calls=queued,
        waiting_calls=waiting,
        running_calls=running,
        outstanding_tokens=view.queue.tokens,
        kv_tokens=kv_tokens,
        kv_used_tokens=used,
        # New blocks are known before the report of those that they have evicted.
        cached_tokens=min(view.residency.resident.blocks * block_tokens, kv_tokens or sys.maxsize),
    )


def _models(admission: Admission) -> list[ModelState]:
    backlogs, gates = admission.queue.backlogs, admission.sessions.gates
    queues = {model: (one.length, round(one.wait_s, 3)) for model, one in backlogs.items()}
    sessions = {model: (len(one.live), len(one.held)) for model, one in gates.items()}
    models = sorted({*queues, *sessions})[:MOST_ENGINES]
    return [ModelState(model, *queues.get(model, (0, 0.0)), *sessions.get(model, (0, 0))) for model in models]


def _held(admission: Admission, label: Callable[[str], str], now_s: float) -> Iterator[HeldTurn]:
    """The held turns, of each tenant those of its oldest sessions first."""
    for model, gate in admission.sessions.gates.items():
        caches = gate.worth.caches
        for turn in gate.held:
            place, expected_s = gate.held.outlook(turn)
            yield HeldTurn(
                model,
                label(turn.asked.tenant),
                turn.tokens,
                round(turn.tried_for_s(now_s), 1),
                place,
                round(expected_s, 1),
                gate.tokens,
                None if caches is None else caches.kv_tokens,
            )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
