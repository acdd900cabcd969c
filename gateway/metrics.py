"""What the gateway counts, for Prometheus: calls, tokens, times, and how well cache predictions match reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from backends.cache_state import CacheState
from gateway.executor import Executor
from gateway.health import HealthState
from gateway.router import Booking, CallUsage, FleetEngine, Router

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
HOLD_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One gateway's registry. `outcome` of a call: `ok`, `refused`, `engine_error`, `unreachable`, `client_gone`."""

    def __init__(self, router: Router, executor: Executor | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        by_engine = ["model", "engine"]
        self._calls = Counter(
            "plait_calls",
            "Calls by where they ran and how they ended",
            [*by_engine, "outcome"],
            registry=self._registry,
        )
        self._placements = Counter(
            "plait_placements", "Placements by reason", [*by_engine, "reason"], registry=self._registry
        )
        self._prompt_tokens = Counter(
            "plait_prompt_tokens", "Prompt tokens of ended calls", by_engine, registry=self._registry
        )
        self._output_tokens = Counter("plait_output_tokens", "Tokens generated", by_engine, registry=self._registry)
        self._predicted = Counter(
            "plait_cached_tokens_predicted",
            "Prompt tokens expected in the engine's cache, of calls whose engine reported them",
            by_engine,
            registry=self._registry,
        )
        self._reported = Counter(
            "plait_cached_tokens_reported", "Prompt tokens the engine found cached", by_engine, registry=self._registry
        )
        self._mispredicted = Counter(
            "plait_cached_tokens_mispredicted",
            "Sum over calls of the distance between expected and found cached tokens",
            by_engine,
            registry=self._registry,
        )
        self._ttft = Histogram(
            "plait_ttft_seconds", "Arrival to first token", by_engine, buckets=TTFT_BUCKETS_S, registry=self._registry
        )
        self._e2e = Histogram(
            "plait_e2e_seconds", "Arrival to last token", by_engine, buckets=E2E_BUCKETS_S, registry=self._registry
        )
        self._hold = Histogram(
            "plait_hold_seconds",
            "Arrival of a call with inputs until they all have values",
            buckets=HOLD_BUCKETS_S,
            registry=self._registry,
        )
        self._retries = Counter(
            "plait_retries",
            "Chained calls that were tried again because this engine failed them",
            by_engine,
            registry=self._registry,
        )
        self._registry.register(_FleetCollector(router))
        if executor is not None:
            self._registry.register(_SessionCollector(executor))

    def placed(self, booking: Booking) -> None:
        """A call was placed."""
        placement = booking.placement
        self._placements.labels(booking.call.model, placement.engine_id, placement.reason.value).inc()

    def ended(self, booking: Booking, outcome: str, usage: CallUsage | None, arrived_s: float, now_s: float) -> None:
        """A call left its engine."""
        labels = (booking.call.model, booking.placement.engine_id)
        self._calls.labels(*labels, outcome).inc()
        if booking.first_token_s is not None:
            self._ttft.labels(*labels).observe(booking.first_token_s - arrived_s)
        if usage is None:
            return
        self._e2e.labels(*labels).observe(now_s - arrived_s)
        self._prompt_tokens.labels(*labels).inc(usage.prompt_tokens)
        self._output_tokens.labels(*labels).inc(usage.output_tokens)
        if usage.cached_tokens is not None:
            predicted = booking.placement.cached_tokens
            self._predicted.labels(*labels).inc(predicted)
            self._reported.labels(*labels).inc(usage.cached_tokens)
            self._mispredicted.labels(*labels).inc(abs(predicted - usage.cached_tokens))

    def held(self, hold_s: float) -> None:
        """A call with inputs became ready."""
        self._hold.observe(hold_s)

    def tried_again(self, model: str, engine_id: str) -> None:
        """A chained call that an engine has failed is about to be tried again."""
        self._retries.labels(model, engine_id).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)


Reading = Callable[[FleetEngine], float | None]
"""A figure of one engine; None where it is not known."""


def _reported(read: Callable[[CacheState], float]) -> Reading:
    """A figure out of the engine's latest report."""
    return lambda engine: None if engine.last_report is None else read(engine.last_report)


ENGINE_GAUGES: dict[str, tuple[str, Reading]] = {
    "up": ("1 while the engine takes calls", lambda engine: engine.health.state is HealthState.UP),
    "reports": ("1 if the engine reports its cache, 0 if it is estimated", lambda engine: bool(engine.reports)),
    "outstanding_calls": ("Calls on the engine", lambda engine: engine.view.outstanding),
    "window_seconds": (
        "Engine time of the calls placed within the window",
        lambda engine: engine.view.ledger.window_cost_s(),
    ),
    "waiting_calls": ("Calls in the engine's queue, as it reports", _reported(lambda report: report.queue.waiting)),
    "running_calls": ("Calls in the engine's batch, as it reports", _reported(lambda report: report.queue.running)),
    "queue_seconds": (
        "Mean time from a call's arrival in the engine to its admission, as it reports",
        _reported(lambda report: report.queue.mean_queue_s),
    ),
    "iteration_seconds": (
        "Mean time of an iteration, as the engine reports",
        _reported(lambda report: report.iteration.mean_s),
    ),
    "kv_tokens": (
        "The engine's KV cache, as it reports",
        _reported(lambda report: report.kv.total_blocks * report.block_tokens),
    ),
    "kv_free_tokens": ("Room in it that nothing fills, as it reports", _reported(lambda report: report.kv_free_tokens)),
    "preemptions": ("Preemptions since its start, as it reports", _reported(lambda r: r.scheduler.preemptions)),
}
"""`plait_engine_*`, by engine."""


class _FleetCollector(Collector):
    """State of the fleet, read from the router when scraped."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        engines = self._router.engines
        for name, (text, read) in ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"plait_engine_{name}", text, labels=["engine"])
            for engine_id, engine in engines.items():
                value = read(engine)
                if value is not None:
                    gauge.add_metric([engine_id], value)
            yield gauge
        resident = GaugeMetricFamily(
            "plait_engine_resident_tokens", "Prompt tokens known to be in the engine's cache", labels=["engine"]
        )
        for engine_id, engine in engines.items():
            resident.add_metric([engine_id], engine.view.residency.resident_blocks * self._router.block_tokens)
        tree = GaugeMetricFamily("plait_prefix_tree_blocks", "Blocks in the prefix tree")
        tree.add_metric([], len(self._router.tree))
        yield from (resident, tree)


class _SessionCollector(Collector):
    """State of the sessions, read when scraped."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def collect(self) -> Iterator[Metric]:
        tenants = self._executor.sessions.tenants.values()
        gauges: dict[str, tuple[str, int]] = {
            "sessions": ("Sessions", len(self._executor.sessions)),
            "semantic_variables": ("Semantic variables", sum(tenant.variables for tenant in tenants)),
            "held_calls": ("Calls that wait for inputs", sum(tenant.waiting_calls for tenant in tenants)),
            "held_bytes": (
                "Values, bodies of calls that have not ended, and answers kept for repetitions",
                sum(tenant.held_bytes for tenant in tenants),
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"plait_{name}", text)
            gauge.add_metric([], value)
            yield gauge
        ended = CounterMetricFamily("plait_variables", "Semantic variables that were set or failed", labels=["state"])
        ended.add_metric(["set"], self._executor.variables_set)
        ended.add_metric(["failed"], self._executor.variables_failed)
        yield ended
