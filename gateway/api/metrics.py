"""Prometheus metrics of requests that got an error from the gateway itself, and of clients that it dropped."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from plait.backends.errors import PlaitError


class RefusalMetrics:
    """Counts errors that the gateway answers with: before a call was sent, or when no engine answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refusals = Counter(
            "plait_refusals", "Requests that the gateway answered with an error", ["status", "code"], registry=registry
        )

    def count(self, error: PlaitError) -> None:
        """Count an error by its status and code."""
        self._refusals.labels(str(error.status), error.code or error.kind).inc()


class SlowClientMetrics:
    """Counts clients that were disconnected because they did not read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._dropped = Counter(
            "plait_slow_clients_dropped", "Connections closed because the client did not read", registry=registry
        )

    def dropped(self) -> None:
        """Count one."""
        self._dropped.inc()
