"""Reads a registry as Prometheus would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from plait.gateway.metrics import exposition


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in exposition(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
