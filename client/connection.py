"""The connection to a gateway, which all sessions of a client share."""

from __future__ import annotations

from dataclasses import dataclass

from plait.client.endings import Endings
from plait.client.flow import Retries
from plait.client.native_runner import NativeRunner
from plait.client.transport import AsyncTransport, BlockingTransport


@dataclass(frozen=True, slots=True)
class Connection:
    """The two transports to one gateway. `model` is the default model of semantic functions."""

    blocking: BlockingTransport
    asynchronous: AsyncTransport
    endings: Endings
    natives: NativeRunner
    retries: Retries
    model: str | None
