"""The thread that makes spans and sends them to a collector (OTLP over HTTP). A dead one costs the loop no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from queue import Empty, Full, Queue
from threading import Thread
from typing import Final

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.gateway.guests.tracing.spans import EndedCall, EndedProgram, spans_of

MOST_WAITING: Final = 2_048
"""Records that wait for the thread. More are dropped."""

MOST_SENT: Final = 512
"""Records in one request."""

TIMEOUT_S: Final = 5.0
"""The longest time for one request and its repetitions."""

log = structlog.get_logger(__name__)


class SpanExporter(Collector):
    """Sends the spans of records. `endpoint` is the collector's address for traces; None: what the environment says."""

    def __init__(self, endpoint: str | None) -> None:
        self._sent = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._resource = Resource.create({"service.name": "plait", "service.version": version("plait")})
        self._waiting: Queue[EndedCall | EndedProgram | None] = Queue(MOST_WAITING)
        self._thread = Thread(target=self._run, name="spans", daemon=True)
        self._is_away = False
        self.dropped = 0
        """Records whose spans nobody has got."""

    def start(self) -> None:
        self._thread.start()

    def add(self, ended: EndedCall | EndedProgram) -> None:
        try:
            self._waiting.put_nowait(ended)
        except Full:
            self.dropped += 1

    def close(self) -> None:
        """Send what waits, and end. Blocks for at most `TIMEOUT_S`."""
        with suppress(Full):
            self._waiting.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_S)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "plait_spans_dropped", "Traced calls and programs whose spans were lost", self.dropped
        )

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            batch = [self._waiting.get()]
            with suppress(Empty):
                while len(batch) < MOST_SENT:
                    batch.append(self._waiting.get_nowait())
            goes_on = None not in batch
            self._send([ended for ended in batch if ended is not None])

    def _send(self, batch: list[EndedCall | EndedProgram]) -> None:
        try:
            spans = [span for ended in batch for span in spans_of(ended, self._resource)]
            is_away = bool(spans) and self._sent.export(spans) is not SpanExportResult.SUCCESS
        except Exception:  # a defect in one record must not end the thread
            log.exception("spans are dropped")
            is_away = True
        self.dropped += len(batch) if is_away else 0
        if is_away and not self._is_away:
            log.warning("no collector takes spans, they are dropped", dropped=self.dropped)
        self._is_away = is_away
