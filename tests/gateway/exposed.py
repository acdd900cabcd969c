"""Reads a registry as Prometheus would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from plait.gateway.metrics import exposition


def exposed_text(registry: CollectorRegistry) -> str:
    return b"".join(exposition(registry)).decode()


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in exposed_text(registry).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
