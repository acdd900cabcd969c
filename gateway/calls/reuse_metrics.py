"""The hit rate that a KV cache of each size would have had: a histogram of prompts' reuse distances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from plait.gateway.metrics import OTHER
from plait.policy.prefix.reuse_distances import BOUNDS_TOKENS, ReuseDistances
from plait.policy.types import Call

MOST_MODELS: Final = 20
"""The most models with a histogram each, which may take 5 MB. Further models share the histogram of `OTHER`."""

_BOUNDS: Final = [*map(floatToGoString, map(float, BOUNDS_TOKENS)), "+Inf"]
"""Written as Prometheus 3 normalizes `le`, so that the same query works in older versions."""


class ReuseCollector(Collector):
    """The reuse distances by model. A bucket counts the prompt tokens that an LRU cache of that size would have hit.

    The histogram has no sum, because tokens that are used for the first time have no distance.
    """

    def __init__(self) -> None:
        self._of: dict[str, ReuseDistances] = {}

    def used(self, call: Call) -> None:
        """Count the prompt of a call when it is first sent."""
        found = self._of.get(call.model) or self._new(call)
        found.used(call.block_hashes)

    def _new(self, call: Call) -> ReuseDistances:
        model = call.model if len(self._of) < MOST_MODELS else OTHER
        return self._of.setdefault(model, ReuseDistances(call.block_tokens))

    def collect(self) -> Iterator[Metric]:
        name = "plait_reuse_distance_tokens"
        family = HistogramMetricFamily(
            name, "Prompt tokens by the size of an LRU cache that would have had them", labels=["model"]
        )
        for model, distances in self._of.items():
            counts = distances.within_tokens()
            family.add_metric([model], list(zip(_BOUNDS, map(float, counts), strict=True)), None)
            family.add_sample(f"{name}_count", {"model": model}, counts[-1])
        yield family
