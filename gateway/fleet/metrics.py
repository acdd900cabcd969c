"""Prometheus metrics of the fleet: each engine as the router knows it, and the prefix tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.backends.protocol.cache_state import TIERS, CacheState
from plait.backends.protocol.engine_counts import EngineCounts
from plait.gateway.fleet.engine import FleetEngine, degradation
from plait.gateway.fleet.health import TAKES_CALLS, HealthChange, HealthState
from plait.gateway.fleet.router import Router

Reading = Callable[[FleetEngine], float | None]
"""Reads one figure of an engine; None if it is not known."""


def _reported(read: Callable[[CacheState], float | None]) -> Reading:
    """A figure from the engine's latest report."""
    return lambda engine: None if engine.cache.last_report is None else read(engine.cache.last_report)


def _counted(report: Callable[[CacheState], float], counts: Callable[[EngineCounts], float | None]) -> Reading:
    """A figure from the latest report, or from the counts of an engine without reports."""

    def read(engine: FleetEngine) -> float | None:
        if engine.cache.last_report is not None:
            return report(engine.cache.last_report)
        return None if engine.counts is None else counts(engine.counts)

    return read


ENGINE_GAUGES: dict[str, tuple[str, Reading]] = {
    "up": ("1 while the engine takes calls", lambda engine: engine.health.state in TAKES_CALLS and not engine.is_aside),
    "draining": ("1 while the engine is draining", lambda engine: engine.draining),
    "stalled": (
        "1 while the engine is silent and does not answer a trial: other engines get the new calls",
        lambda engine: engine.stalled,
    ),
    "reports": ("1 if the engine reports its cache, 0 if it is estimated", lambda engine: bool(engine.cache.reports)),
    "degraded": (
        "1 while the engine has Plait's plugin but no usable report, or differs from what the gateway has: see /ready",
        lambda engine: degradation(engine) is not None,
    ),
    "outstanding_calls": ("Calls on the engine", lambda engine: engine.view.outstanding),
    "other_calls": (
        "Calls on the engine that this gateway has not sent, as it reports or counts",
        lambda engine: engine.view.reported + engine.view.others,
    ),
    "slowness": (
        "Observed over predicted times against what is usual in the fleet; 1 while it is like the others",
        lambda engine: engine.view.slowness,
    ),
    "window_seconds": (
        "Engine time of the calls placed within the window",
        lambda engine: engine.view.ledger.window_cost_s(),
    ),
    "waiting_calls": (
        "Calls in the engine's queue, as it reports or counts",
        _counted(lambda report: report.queue.waiting, lambda counts: counts.waiting),
    ),
    "running_calls": (
        "Calls in the engine's batch, as it reports or counts",
        _counted(lambda report: report.queue.running, lambda counts: counts.running),
    ),
    "slots": (
        "Calls that the engine runs at a time, as it reports",
        _reported(lambda report: report.scheduler.slots or None),
    ),
    "queue_seconds": (
        "Mean time from a call's arrival in the engine to its admission, as it reports",
        _reported(lambda report: report.queue.mean_queue_s),
    ),
    "iteration_seconds": (
        "Mean time of an iteration, as the engine reports",
        _reported(lambda report: report.iteration.mean_s),
    ),
    "kv_tokens": (
        "Size of the engine's KV cache in tokens, as it reports",
        lambda engine: None if engine.cache.last_report is None else engine.cache.told_tokens,
    ),
    "kv_free_tokens": (
        "Empty part of the engine's KV cache in tokens, as it reports",
        lambda engine: engine.cache.free_tokens,
    ),
    "preemptions": (
        "Preemptions since the engine's start, as it reports",
        _reported(lambda r: r.scheduler.preemptions),
    ),
}
"""Name without the prefix `plait_engine_` -> (help text, how to read the value of an engine)."""


KNOWLEDGE = ("exact", "counts", "estimated")


def knowledge_of(engine: FleetEngine) -> str:
    """The source of what the gateway knows about an engine's cache and load.

    `exact`: cache reports. `counts`: the engine's own counts of its calls. `estimated`: only the gateway's bookings.
    """
    if engine.cache.reports:
        return "exact"
    return "estimated" if engine.counts is None else "counts"


class FleetCollector(Collector):
    """The state of the fleet, read from the router when scraped."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """The figures of each engine and its tiers, and the size of the prefix tree. Unknown figures have no sample."""
        engines = self._router.engines
        for name, (text, read) in ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"plait_engine_{name}", text, labels=["engine"])
            for engine_id, engine in engines.items():
                value = read(engine)
                if value is not None:
                    gauge.add_metric([engine_id], value)
            yield gauge
        yield self._one_of("health", "1 for the engine's state", "state", HealthState, lambda one: one.health.state)
        known = "1 for what is known of the engine's cache and load"
        yield self._one_of("knowledge", known, "knowledge", KNOWLEDGE, knowledge_of)
        done = "1 for what the engine's adapter does in it, as it reports"
        yield self._one_of("tier", done, "tier", TIERS, lambda one: one.tier)
        resident = GaugeMetricFamily(
            "plait_engine_resident_tokens", "Prompt tokens known to be in the engine's cache", labels=["engine"]
        )
        for engine_id, engine in engines.items():
            resident.add_metric([engine_id], engine.view.residency.resident.blocks * self._router.block_tokens)
        yield resident
        yield from self._tiers()
        yield GaugeMetricFamily("plait_prefix_tree_blocks", "Blocks in the prefix tree", len(self._router.tree))

    def _tiers(self) -> Iterator[Metric]:
        labels, block_tokens = ["engine", "tier"], self._router.block_tokens
        size = GaugeMetricFamily(
            "plait_engine_tier_size_tokens", "Tokens that fit into a tier below the accelerator", labels=labels
        )
        resident = GaugeMetricFamily(
            "plait_engine_tier_resident_tokens", "Tokens whose fastest copy is known to be in the tier", labels=labels
        )
        loaded = CounterMetricFamily(
            "plait_engine_loaded_tokens", "Tokens that the engine has brought back, as it reports", labels=labels
        )
        for engine_id, engine in self._router.engines.items():
            above = engine.view.residency.resident.blocks
            for view in engine.view.tiers.views:
                blocks, place = view.residency.resident.blocks, [engine_id, view.residency.tier]
                size.add_metric(place, view.total_tokens)
                resident.add_metric(place, max(0, blocks - above) * block_tokens)
                loaded.add_metric(place, view.loaded_tokens)
                above = blocks
        yield from (size, resident, loaded)

    def _one_of(
        self, name: str, text: str, label: str, values: Iterable[str], read: Callable[[FleetEngine], str | None]
    ) -> Metric:
        """A gauge that is 1 for the one of `values` that an engine has, and 0 for the others."""
        gauge = GaugeMetricFamily(f"plait_engine_{name}", text, labels=["engine", label])
        found = {engine_id: read(engine) for engine_id, engine in self._router.engines.items()}
        for engine_id, value in found.items():
            for one in values if value is not None else ():
                gauge.add_metric([engine_id, str(one)], one == value)
        return gauge


LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class HealthMetrics:
    """Counts the changes of the engines' health, and has the event loop's lag: a late loop notices changes late."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._changes = Counter(
            "plait_engine_health_changes",
            "Changes of an engine's health, by the new state and the cause",
            ["engine", "state", "cause"],
            registry=registry,
        )
        self.loop_lag = Histogram(
            "plait_loop_lag_seconds",
            "How late the gateway's event loop runs what is due, looked at 20 times a second",
            buckets=LAG_BUCKETS_S,
            registry=registry,
        )

    def changed(self, change: HealthChange) -> None:
        self._changes.labels(change.engine_id, change.after.value, change.cause).inc()
