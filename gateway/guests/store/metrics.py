"""Prometheus metrics of the store's thread."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.gateway.guests.store.group_commit import GroupCommit


class StoreCollector(Collector):
    def __init__(self, log: GroupCommit) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        failing, refused = int(self._log.problem is not None), self._log.writer.refused + self._log.jobs.refused
        yield GaugeMetricFamily("plait_store_failing", "1 while nothing can be stored", failing)
        yield GaugeMetricFamily("plait_store_backlog_bytes", "Events that wait to be written", self._log.backlog_bytes)
        yield CounterMetricFamily("plait_store_commits", "Commits", self._log.writer.commits)
        yield CounterMetricFamily("plait_store_events", "Events written", self._log.writer.changes)
        yield CounterMetricFamily("plait_store_refused", "Changes and questions whose data it refused", refused)
        yield CounterMetricFamily("plait_store_cpu_seconds", "CPU time of the store's thread", self._log.cpu_s)
