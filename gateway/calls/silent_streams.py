"""Keep-alive comments for streams that are silent.

Clients and proxies give up after a minute without a byte, some earlier. A stream may be silent while it waits in
admission, for its engine's first token, or for a tool call's arguments. After `SILENT_S` its client gets a status (if
it has none yet) and an SSE comment, and another comment after each further `SILENT_S`. One task looks at all open
streams, once a second: a timer for each call would cost more.
"""

from __future__ import annotations

import asyncio
from typing import Final

from plait.gateway.calls.call import Attempt
from plait.gateway.calls.commented_sink import CommentedSink
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.gate import Gate
from plait.gateway.timer import loop_time_s

SILENT_S: Final = 10.0
LOOK_S: Final = 1.0

WAITING: Final = "waiting"
"""The comment in a stream whose engine is silent."""


class SilentStreams:
    """The open streams of clients. `gate` knows the position and the expected wait of a call in admission."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._told_s: dict[Delivery, float] = {}  # when each call arrived, or got its latest comment

    def begin(self, delivery: Delivery) -> CommentedSink:
        commented = CommentedSink(delivery.sink, delivery.asked.form, delivery.call.call_id)
        self._told_s[delivery] = delivery.arrived_s
        return commented

    def end(self, delivery: Delivery) -> None:
        self._told_s.pop(delivery, None)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(loop_time_s())

    def look(self, now_s: float) -> None:
        """Send a comment to the clients that have had no byte for `SILENT_S`."""
        silent_s = now_s - SILENT_S
        for delivery in [one for one, told_s in self._told_s.items() if told_s <= silent_s]:
            attempt = delivery.attempt
            if delivery.is_told and attempt is not None and attempt.booking.byte_s > silent_s:
                continue
            self._told_s[delivery] = now_s
            if not delivery.is_told:
                self._tell(delivery)
            elif attempt is not None and _goes_on(attempt) and not delivery.sink.is_full:
                delivery.sink.write(delivery.asked.form.sign_of_life(WAITING, has_begun=True))

    def _tell(self, delivery: Delivery) -> None:
        """Send a status and a comment to a client that has no byte of its answer."""
        commented, entry = delivery.commented, delivery.entry
        assert commented is not None
        # From here on the answer has a status, so `CommentedSink` turns errors and late headers into events.
        delivery.redirect(commented)
        commented.tell((entry and self._gate.outlook(entry)) or WAITING)


def _goes_on(attempt: Attempt) -> bool:
    """Whether the engine still has to send a part of a stream that has begun."""
    exchange = attempt.exchange
    return attempt.is_open and attempt.answer.outcome is None and exchange is not None and not exchange.has_last_event
