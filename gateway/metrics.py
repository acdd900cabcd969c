"""The registry that Prometheus scrapes. Each room has its own metrics module, and the app registers them all."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SAMPLES_AT_ONCE: Final = 200
"""Samples that a scrape writes before the event loop has its turn: about two milliseconds."""


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures and the build's. Its counters have no `_created` series."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(TaskCollector())
    build = Info("plait_build", "The version of Plait and of Python", registry=registry)
    build.info({"version": version("plait"), "python": platform.python_version()})
    return registry


class TaskCollector(Collector):
    """The tasks of the event loop that serves the scrape. A number that grows without load is a leak."""

    def collect(self) -> Iterator[Metric]:
        """One gauge; nothing outside an event loop."""
        try:
            tasks = len(asyncio.all_tasks())
        except RuntimeError:
            return
        gauge = GaugeMetricFamily("plait_tasks", "Tasks of the event loop")
        gauge.add_metric([], tasks)
        yield gauge


async def scrape(registry: CollectorRegistry) -> bytes:
    """The registry's metrics in Prometheus' text format, written in turns with what else the event loop has to do.

    The text of a hundred engines takes a quarter of a second: streams would stop, and probes be late, with each scrape.
    """
    pieces = []
    for piece in _pieces(registry):
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces)


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry's metrics in Prometheus' text format."""
    return b"".join(_pieces(registry))


def _pieces(registry: CollectorRegistry) -> Iterator[bytes]:
    """The text, each piece a part of one family."""
    for family in registry.collect():
        part = Metric(family.name, family.documentation, family.type)
        for start in range(0, max(1, len(family.samples)), SAMPLES_AT_ONCE):
            part.samples = family.samples[start : start + SAMPLES_AT_ONCE]
            text = generate_latest(_Family(part))
            yield text if start == 0 else text.split(b"\n", 2)[2]  # its HELP and its TYPE have been written


class _Family(Collector):
    """One family as a registry of its own."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """The family."""
        yield self._family
