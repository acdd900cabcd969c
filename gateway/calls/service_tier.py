"""OpenAI's `service_tier` in an answer: what the call had, by its objective. In a stream, the first event says it."""

from __future__ import annotations

from typing import Final

import msgspec

from plait.gateway.asgi import Headers, Sink
from plait.gateway.calls.annotations import TIERS
from plait.gateway.calls.commented_sink import WrappedSink
from plait.gateway.calls.outgoing import FIELDS
from plait.policy.types import Objective

_TIERS: Final = {objective: tier for tier, objective in TIERS.items()}
_EVENT: Final = b"data: {"


class TierSink(WrappedSink):
    """The `sink` of a chat that has asked for a tier."""

    def __init__(self, sink: Sink, objective: Objective | None) -> None:
        super().__init__(sink)
        self._tier = msgspec.json.encode("default" if objective is None else _TIERS[objective])
        self._has_told = False

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        if status == 200 and body.startswith(b"{"):
            body = msgspec.json.encode({**FIELDS.decode(body), "service_tier": msgspec.Raw(self._tier)})
        self._sink.whole(status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        self._sink.start(status, headers)

    def write(self, body: bytes) -> None:
        self._sink.write(self._told(body))

    def end(self, body: bytes = b"") -> None:
        self._sink.end(self._told(body))

    def _told(self, events: bytes) -> bytes:
        if self._has_told or _EVENT not in events:
            return events
        self._has_told = True
        return events.replace(_EVENT, b'%b"service_tier":%b,' % (_EVENT, self._tier), 1)
