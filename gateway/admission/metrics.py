"""Prometheus metrics of what waits in the gateway."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.gateway.admission.admission import Admission


class AdmissionCollector(Collector):
    """What waits for an engine, read when scraped. What was refused is in `plait_refusals_total`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """Waiting calls and their predicted wait, by model."""
        calls = GaugeMetricFamily("plait_waiting_calls", "Calls that wait to be sent to their engine", labels=["model"])
        seconds = GaugeMetricFamily("plait_waiting_seconds", "Predicted time until all are sent", labels=["model"])
        for model in list(self._admission.backlogs):
            calls.add_metric([model], self._admission.waiting(model))
            seconds.add_metric([model], self._admission.wait_s(model))
        yield from (calls, seconds)
