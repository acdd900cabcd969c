"""The registry that Prometheus scrapes. Each room has its own metrics module, and the app registers them all."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest


def new_registry() -> CollectorRegistry:
    """An empty registry. Its counters will have no `_created` series."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry's metrics in Prometheus' text format."""
    return generate_latest(registry)
