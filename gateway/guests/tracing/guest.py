"""The guest that traces calls."""

from __future__ import annotations

import asyncio
from typing import Final

from plait.gateway.doors import Guest, House
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.receipts.receipts import Receipts

LOOK_S: Final = 1.0
"""The period in which programs are looked for that are over."""


class TracingGuest(Guest):
    """Sends spans to `[tracing] endpoint`. Its record of an ended call is the receipt, so it needs receipts."""

    def __init__(self, house: House) -> None:
        try:
            from plait.gateway.guests.tracing.exporter import SpanExporter  # noqa: PLC0415 - an extra has what it needs
            from plait.gateway.guests.tracing.tracing import Tracing  # noqa: PLC0415
        except ImportError:
            raise ValueError("tracing needs OpenTelemetry: pip install 'plait[otel]'") from None
        self._kernel, settings = house.kernel, house.kernel.config.tracing
        self._exporter = SpanExporter(settings.endpoint)
        self._kernel.registry.register(self._exporter)
        chained = house.find(ChainedCalls)
        self._tracing = Tracing(
            settings,
            house[Receipts],
            None if chained is None else chained.executor.sessions,
            self._exporter.add,
            label=self._kernel.tenants.label,
            engine=self._engine,
        )
        self.accompany = self._tracing.begins

    def start(self) -> None:
        self._exporter.start()
        self._kernel.supervisor.start("traced-programs", self._look)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._tracing.look()

    def _engine(self, name: str) -> tuple[str, str, int]:
        """An engine's software, host and port."""
        engine, link = self._kernel.router.engines.get(name), self._kernel.links.get(name)
        kind = None if engine is None else engine.kind
        return kind or "openai", *(("", 0) if link is None else link.client.address)

    async def stop(self) -> None:
        self._tracing.look(all_of_them=True)
        await asyncio.to_thread(self._exporter.close)
