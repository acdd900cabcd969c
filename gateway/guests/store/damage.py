"""Metrics of damage found in a store: missing or changed data. Each finding is also logged by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Kind = Literal["stream", "age"]

KINDS: Final[dict[Kind, str]] = {
    "stream": "one stream cannot be read, and was set aside",
    "age": "the file is older than the one that was there",
}


class Damage(Collector):
    """Counts damage by kind. Each kind is counted by one thread only."""

    def __init__(self) -> None:
        self.counts: Counter[Kind] = Counter(dict.fromkeys(KINDS, 0))

    def found(self, kind: Kind) -> None:
        self.counts[kind] += 1

    def collect(self) -> Iterator[Metric]:
        what = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items())
        family = CounterMetricFamily("plait_store_damage", f"Damage found in the store ({what})", labels=["kind"])
        for kind, count in sorted(self.counts.items()):
            family.add_metric([kind], count)
        yield family
