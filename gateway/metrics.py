"""The Prometheus registry, and counters and histograms without locks for the data path.

Each room has its own metrics module, and the app registers them all. A call updates a dozen metrics and each piece of a
stream one, all in the event loop's thread, so `FastCounter` and `FastHistogram` need no locks.
"""

from __future__ import annotations

import asyncio
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SAMPLES_AT_ONCE: Final = 200
"""A scrape yields to the event loop after this many samples, about two milliseconds."""

MOST_LABEL_SETS: Final = 10_000
"""The most label sets of a family, because the number of tenants is unlimited."""

OTHER: Final = "other"


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
        yield GaugeMetricFamily("plait_tasks", "Tasks of the event loop", tasks)


async def scrape(registry: CollectorRegistry) -> bytes:
    """The metrics in Prometheus' text format. Yields to the event loop between pieces.

    The text of a hundred engines takes a quarter of a second; in one piece, each scrape would delay streams and probes.
    """
    pieces = []
    for piece in exposition(registry):
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces)


def exposition(registry: CollectorRegistry) -> Iterator[bytes]:
    """The text in pieces, each a part of one family."""
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
        yield self._family


class Buckets:
    """The counts of one histogram. `observe` costs a bisection, because it runs for every piece of a stream.

    prometheus_client's own histogram takes a lock and a linear search for each sample.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """The samples up to each bound, as Prometheus counts them, and their sum."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


class Count:
    """One counter's value. It only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


_Counted = TypeVar("_Counted")


class _ByLabels(dict[tuple[str, ...], _Counted]):
    """The counts of each label set, created at the first lookup, without a lock.

    Beyond `MOST_LABEL_SETS`, new label sets share the one whose labels are all `OTHER`.
    """

    def __init__(self, new: Callable[[], _Counted]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, values: tuple[str, ...]) -> _Counted:
        if len(self) >= MOST_LABEL_SETS and (others := (OTHER,) * len(values)) != values:
            return self[others]
        found = self[values] = self._new()
        return found


class FastHistogram(Collector):
    """A histogram by labels, whose samples are observed through `of`."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self.of = _ByLabels(lambda: Buckets(bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, buckets in self.of.items():
            counts, total = buckets.cumulative()
            family.add_metric(values, counts, total)
        yield family


class FastCounter(Collector):
    """A counter by labels, counted through `of`. It shows what prometheus_client's own counter shows.

    That one takes a lock for each count and for each look-up of labels, and every call makes a dozen of them.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self.of = _ByLabels(Count)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self.of.items():
            family.add_metric(values, count.value)
        yield family
