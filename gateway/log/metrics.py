"""What the log has lost."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.gateway.log.background_stderr import dropped_lines
from plait.gateway.log.line_buffer import FULL


class LogCollector(Collector):
    """The lines that the log has dropped. An error of writing is the reason for those that it has cost."""

    def collect(self) -> Iterator[Metric]:
        """One counter."""
        family = CounterMetricFamily(
            "plait_log_lines_dropped", "Lines of the log that were dropped", labels=["severity", "reason"]
        )
        found = {(False, FULL): 0, (True, FULL): 0, **dropped_lines()}
        for (urgent, reason), lines in found.items():
            family.add_metric(["warning" if urgent else "info", reason], lines)
        yield family
