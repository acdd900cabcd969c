"""OpenAI's `service_tier` in an answer: what the call had, by its objective. In a stream, the first event says it."""

from __future__ import annotations

from typing import Final

import msgspec

from plait.gateway.asgi import Sink, Stage
from plait.gateway.calls.annotations import TIERS
from plait.gateway.calls.outgoing import FIELDS
from plait.policy.types import Objective

_TIERS: Final = {objective: tier for tier, objective in TIERS.items()}
_EVENT: Final = b"data: {"


class Tier(Stage):
    """Tells the tier in the answer of a chat that has asked for one."""

    def __init__(self, to: Sink, objective: Objective | None) -> None:
        super().__init__(to)
        self._tier = msgspec.json.encode("default" if objective is None else _TIERS[objective])
        self._has_told = False

    def body(self, status: int, body: bytes | bytearray) -> bytes | bytearray:
        if status == 200 and body.startswith(b"{"):
            return msgspec.json.encode({**FIELDS.decode(body), "service_tier": msgspec.Raw(self._tier)})
        return body

    def events(self, events: bytes) -> bytes:
        if self._has_told or _EVENT not in events:
            return events
        self._has_told = True
        return events.replace(_EVENT, b'%b"service_tier":%b,' % (_EVENT, self._tier), 1)
