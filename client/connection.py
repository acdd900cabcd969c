"""How a gateway is reached: what every session of a client shares."""

from __future__ import annotations

from dataclasses import dataclass

from plait.client.flow import Retries
from plait.client.transport import AsyncTransport, BlockingTransport


@dataclass(frozen=True, slots=True)
class Connection:
    """Two transports to one gateway. `model` serves the semantic functions that name none."""

    blocking: BlockingTransport
    asynchronous: AsyncTransport
    retries: Retries
    model: str | None
