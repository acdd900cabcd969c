"""The receipt with a client's answer: in a header when the answer begins, in a comment when its stream ends."""

from __future__ import annotations

import json
from typing import Any, Final

from plait.gateway.asgi import Headers, Sink, Stage
from plait.gateway.calls.delivery import Delivery
from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.guests.receipts.view import Fields, shown

HEADER: Final = b"plait-receipt"
MOST_BYTES: Final = 2048
"""The longest header. Proxies take 4 or 8 KB of headers in all."""


class ToldReceipt(Stage):
    """Tells a call's receipt in the answer, if it has asked for it."""

    def __init__(self, to: Sink, delivery: Delivery, receipts: Receipts) -> None:
        super().__init__(to)
        self._delivery = delivery
        self._receipts = receipts
        self._has_told = False

    def head(self, headers: Headers) -> Headers:
        return [*headers, (HEADER, in_header(self._fields()))]

    def _fields(self) -> Fields:
        return shown(self._receipts.of(self._delivery))

    def events(self, events: bytes) -> bytes:
        """Insert the receipt as a comment before the last event of the stream."""
        attempt = self._delivery.attempt
        if self._has_told or attempt is None or attempt.exchange is None or not attempt.exchange.has_last_event:
            return events
        if not self._delivery.asked.form.has_events:
            return events
        self._has_told = True
        attempt.exchange.keep()
        begins = events.rstrip(b"\r\n").rfind(b"\n\n") + 2
        begins = begins if begins > 1 else 0
        return b"%b: plait-receipt %b\n\n%b" % (events[:begins], _compact(self._fields()), events[begins:])


def in_header(fields: Fields) -> bytes:
    """A receipt in at most `MOST_BYTES`. A longer one loses whole kinds of fields, the parts of costs first."""
    for left_out in ("", "parts", "candidates", "attempts", "moves", "waits"):
        fields = {name: _without(value, left_out) for name, value in fields.items() if name != left_out}
        if len(found := _compact(fields)) <= MOST_BYTES:
            return found
    return _compact({"request_id": fields["request_id"]})


def _without(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, name) for key, one in value.items() if key != name}
    return [_without(one, name) for one in value] if isinstance(value, list) else value


def _compact(fields: Fields) -> bytes:
    """ASCII JSON without null or empty fields."""
    kept = {name: value for name, value in fields.items() if value not in (None, [], {})}
    return json.dumps(kept, separators=(",", ":")).encode()
