"""Prometheus metrics of calls: tokens, times, outcomes, and how well cache predictions match reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter

from plait.gateway.calls.exchange import Exchange
from plait.gateway.calls.objective_metrics import ObjectiveMetrics
from plait.gateway.calls.parity import Parity
from plait.gateway.fleet.booking import Booking
from plait.gateway.metrics import Buckets, Count, FastCounter, FastHistogram

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)


TOKENS = {
    "prompt_tokens": "Prompt tokens of ended calls",
    "output_tokens": "Tokens generated",
    "cached_tokens_predicted": "Prompt tokens predicted to be cached, of calls whose engine reported its cached tokens",
    "cached_tokens_reported": "Prompt tokens the engine found cached",
    "cached_tokens_mispredicted": "Sum over calls of the difference between predicted and reported cached tokens",
}


class _OfEngine(NamedTuple):
    """The metrics of one model on one engine that each call updates, looked up together."""

    ok: Count
    ttft: Buckets
    tpot: Buckets
    e2e: Buckets
    prompt_tokens: Count
    output_tokens: Count
    predicted: Count
    reported: Count
    mispredicted: Count


class CallMetrics:
    """Counters and histograms that are updated when calls are placed and when they end.

    A call counts on each engine that it was sent to. Its `outcome` there is `ok`, `refused` (the caller's fault),
    `failed` (the engine's) or `client_gone`. `tenant_label` turns a tenant into what operators read.
    """

    def __init__(self, registry: CollectorRegistry, tenant_label: Callable[[str], str] = str) -> None:
        self.tenant_label = tenant_label
        by_engine = ["model", "engine"]
        self._calls = FastCounter("plait_calls", "Calls by model, engine and outcome", [*by_engine, "outcome"])
        self._placements = FastCounter("plait_placements", "Placements by reason", [*by_engine, "reason"])
        self._tokens = [FastCounter(f"plait_{name}", text, by_engine) for name, text in TOKENS.items()]
        for collector in (self._calls, self._placements, *self._tokens):
            registry.register(collector)
        self._by_engine: dict[tuple[str, str], _OfEngine] = {}
        self._count_retries(registry)
        self._measure_times(registry)
        self.objectives = ObjectiveMetrics(registry, tenant_label)

    def _count_retries(self, registry: CollectorRegistry) -> None:
        by_engine = ["model", "engine"]
        self._failures = Counter(
            "plait_call_failures", "Calls that the engine failed, by cause", [*by_engine, "cause"], registry=registry
        )
        self._retries = Counter(
            "plait_retries", "Calls that were tried again after this engine failed them", [*by_engine, "cause"],
            registry=registry,
        )  # fmt: skip
        self._not_retried = Counter(
            "plait_retries_refused", "Failed calls that were not tried again", ["model", "why"], registry=registry
        )
        self._corrected = Counter(
            "plait_usage_corrected", "Answers whose reported usage was out of bounds", by_engine, registry=registry
        )

    def _measure_times(self, registry: CollectorRegistry) -> None:
        by_engine = ["model", "engine"]
        self._ttft = FastHistogram("plait_ttft_seconds", "Arrival to first token", by_engine, TTFT_BUCKETS_S)
        self._tpot = FastHistogram(
            "plait_tpot_seconds", "Mean time per output token after the first", by_engine, ITL_BUCKETS_S
        )
        self._e2e = FastHistogram("plait_e2e_seconds", "Arrival to last token", by_engine, E2E_BUCKETS_S)
        self.gaps = FastHistogram("plait_itl_seconds", "Time between two pieces of a stream", by_engine, ITL_BUCKETS_S)
        self._parity = Parity()
        for collector in (self._ttft, self._tpot, self._e2e, self.gaps, self._parity):
            registry.register(collector)

    def placed(self, booking: Booking) -> None:
        """A call was placed."""
        placement = booking.placement
        self._placements.of(booking.call.model, placement.engine_id, placement.reason).inc()

    def retried(self, model: str, engine_id: str, cause: str) -> None:
        """A call that the engine failed is tried again."""
        self._retries.labels(model, engine_id, cause).inc()

    def not_retried(self, model: str, why: str) -> None:
        """A call that an engine failed is not tried again."""
        self._not_retried.labels(model, why).inc()

    def ended(self, exchange: Exchange, outcome: str, cause: str | None, now_s: float) -> None:
        """A call left its engine. `cause` is the kind of failure, if the engine failed it."""
        booking, usage, arrived_s = exchange.booking, exchange.usage, exchange.delivery.arrived_s
        model, engine_id = booking.call.model, booking.placement.engine_id
        mine = self._of(model, engine_id)
        if outcome == "ok":
            mine.ok.inc()
        else:
            self._calls.of(model, engine_id, outcome).inc()
        if cause is not None:
            self._failures.labels(model, engine_id, cause).inc()
        if booking.first_token_s is not None:
            mine.ttft.observe(booking.first_token_s - arrived_s)
        if exchange.usage_corrected:
            self._corrected.labels(model, engine_id).inc()
        if usage is None or outcome != "ok":
            return
        mine.e2e.observe(now_s - arrived_s)
        if booking.first_token_s is not None and usage.output_tokens > 1:
            mine.tpot.observe((now_s - booking.first_token_s) / (usage.output_tokens - 1))
        mine.prompt_tokens.inc(usage.prompt_tokens)
        mine.output_tokens.inc(usage.output_tokens)
        if usage.cached_tokens is not None:
            predicted = booking.placement.cached_tokens
            mine.predicted.inc(predicted)
            mine.reported.inc(usage.cached_tokens)
            mine.mispredicted.inc(abs(predicted - usage.cached_tokens))
            self._parity.observe(model, engine_id, predicted, usage, now_s)

    def _of(self, model: str, engine_id: str) -> _OfEngine:
        found = self._by_engine.get((model, engine_id))
        if found is None:
            found = self._by_engine[model, engine_id] = _OfEngine(
                self._calls.of(model, engine_id, "ok"),
                self._ttft.of(model, engine_id),
                self._tpot.of(model, engine_id),
                self._e2e.of(model, engine_id),
                *(counter.of(model, engine_id) for counter in self._tokens),
            )
        return found
