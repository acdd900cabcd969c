"""Streams that are silent, and the signs of life that their clients get.

Clients and proxies give up after a minute without a byte, some after less. Whatever a stream waits for, its line, its
engine or a tool's arguments: after `SILENT_S` its client gets a status, if it has none, and a comment, and another one
after each further `SILENT_S`. All open streams are looked at together: a timer of its own would cost each call.
"""

from __future__ import annotations

import asyncio
from typing import Final

from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.gate import Gate, HeldStream
from plait.gateway.timer import loop_time_s

SILENT_S: Final = 10.0
LOOK_S: Final = 1.0

WAITING: Final = "waiting"
"""The comment in a stream whose engine is silent."""


class SilentStreams:
    """The open streams of clients. The `gate` knows how long a stream that waits there has to wait."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._told_s: dict[Delivery, float] = {}  # when each arrived, or got its latest sign of life

    def begin(self, delivery: Delivery) -> None:
        """A client waits for a stream."""
        delivery.held_stream = HeldStream(delivery.sink, delivery.form, delivery.call.call_id)
        self._told_s[delivery] = delivery.arrived_s

    def end(self, delivery: Delivery) -> None:
        """The client waits no more."""
        self._told_s.pop(delivery, None)

    async def watch(self) -> None:
        """Look at all streams, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(loop_time_s())

    def look(self, now_s: float) -> None:
        """Give a sign of life to the clients that have had no byte for `SILENT_S`."""
        silent_s = now_s - SILENT_S
        for delivery in [one for one, told_s in self._told_s.items() if told_s <= silent_s]:
            booking, held = delivery.booking, delivery.held_stream
            assert held is not None
            if delivery.response_started and booking is not None and booking.byte_s > silent_s:
                continue
            self._told_s[delivery] = now_s
            if not delivery.response_started:
                delivery.sink = held
                if delivery.exchange is not None:
                    delivery.exchange.redirect(held)
                held.tell(self._gate.outlook(delivery) or WAITING)
            elif _goes_on(delivery) and not delivery.sink.is_full:
                delivery.sink.write(delivery.form.sign_of_life(WAITING, has_begun=True))


def _goes_on(delivery: Delivery) -> bool:
    """Whether more of a stream that has begun is to come."""
    return delivery.ended is None and delivery.exchange is not None and not delivery.exchange.has_last_event
