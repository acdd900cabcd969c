"""Prometheus metrics of calls: tokens, times, outcomes, and how well cache predictions match reports."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from plait.gateway.fleet.booking import Booking, CallUsage

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class CallMetrics:
    """Counters and histograms that are updated when calls are placed and when they end.

    A call's `outcome` is `ok`, `refused`, `engine_error`, `unreachable` or `client_gone`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        by_engine = ["model", "engine"]
        self._calls = Counter(
            "plait_calls",
            "Calls by model, engine and outcome",
            [*by_engine, "outcome"],
            registry=registry,
        )
        self._placements = Counter(
            "plait_placements", "Placements by reason", [*by_engine, "reason"], registry=registry
        )
        self._prompt_tokens = Counter(
            "plait_prompt_tokens", "Prompt tokens of ended calls", by_engine, registry=registry
        )
        self._output_tokens = Counter("plait_output_tokens", "Tokens generated", by_engine, registry=registry)
        self._predicted = Counter(
            "plait_cached_tokens_predicted",
            "Prompt tokens predicted to be cached, of calls whose engine reported its cached tokens",
            by_engine,
            registry=registry,
        )
        self._reported = Counter(
            "plait_cached_tokens_reported", "Prompt tokens the engine found cached", by_engine, registry=registry
        )
        self._mispredicted = Counter(
            "plait_cached_tokens_mispredicted",
            "Sum over calls of the absolute difference between predicted and reported cached tokens",
            by_engine,
            registry=registry,
        )
        self._ttft = Histogram(
            "plait_ttft_seconds", "Arrival to first token", by_engine, buckets=TTFT_BUCKETS_S, registry=registry
        )
        self._e2e = Histogram(
            "plait_e2e_seconds", "Arrival to last token", by_engine, buckets=E2E_BUCKETS_S, registry=registry
        )

    def placed(self, booking: Booking) -> None:
        """Count a call's placement."""
        placement = booking.placement
        self._placements.labels(booking.call.model, placement.engine_id, placement.reason.value).inc()

    def ended(self, booking: Booking, outcome: str, usage: CallUsage | None, arrived_s: float, now_s: float) -> None:
        """Count a call that has left its engine, with its times and tokens."""
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
