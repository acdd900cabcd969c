"""Which hit rate a KV cache of each size would have given: a histogram of the reuse distances of prompts."""

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
"""Models with distances of their own: each may take 5 MB. Further ones share those of `OTHER`."""

_BOUNDS: Final = [*map(floatToGoString, map(float, BOUNDS_TOKENS)), "+Inf"]
"""As Prometheus writes them since its version 3, so that a query finds them in each."""


class ReuseCollector(Collector):
    """The distances by model, counted in tokens: those up to a bound are what a cache of that size would have had.

    The histogram has no sum, because what is used for the first time has no distance.
    """

    def __init__(self) -> None:
        self._of: dict[str, ReuseDistances] = {}

    def used(self, call: Call) -> None:
        """An engine gets the call, for the first time."""
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
