"""Prometheus metrics of what waits in the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.gateway.admission.admission import Admission


class AdmissionCollector(Collector):
    """What waits for an engine, read when scraped. What was refused is in `plait_refusals_total`.

    `tenant_label` turns a tenant into what operators read.
    """

    def __init__(self, admission: Admission, tenant_label: Callable[[str], str] = str) -> None:
        self._admission = admission
        self._tenant_label = tenant_label

    def collect(self) -> Iterator[Metric]:
        """Waiting calls and their predicted wait, by model, and by tenant for those that have some."""
        of_all = _families("plait_waiting", "Calls that wait to be sent to their engine", ["model"])
        of_one = _families("plait_tenant_waiting", "Calls of a tenant that wait", ["tenant", "model"])
        for model, backlog in list(self._admission.backlogs.items()):
            _add(of_all, [model], backlog.length, backlog.wait_s)
            for tenant in backlog.tenants():
                labels = [self._tenant_label(tenant), model]
                _add(of_one, labels, backlog.waiting(tenant), backlog.tenant_wait_s(tenant))
        yield from (*of_all, *of_one)


def _families(name: str, what: str, labels: Sequence[str]) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    """Of calls, and of seconds."""
    calls = GaugeMetricFamily(f"{name}_calls", what, labels=labels)
    return calls, GaugeMetricFamily(f"{name}_seconds", "Predicted time until all of them are sent", labels=labels)


def _add(families: Iterable[GaugeMetricFamily], labels: Sequence[str], *values: float) -> None:
    for family, value in zip(families, values, strict=True):
        family.add_metric(labels, value)
