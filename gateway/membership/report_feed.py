"""One engine's cache-state reports. A busy engine has news at every iteration: the gateway's most frequent request."""

from __future__ import annotations

from typing import Final, Self
from urllib.parse import urlencode

import msgspec

from plait.backends.errors import UnsupportedError
from plait.backends.protocol.cache_state import CacheState
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.membership.engine_requests import EngineRequests, RefusedRequestError

PATH: Final = "/cache_state"

MAX_BYTES: Final = 2**27
"""Of a report. A snapshot of a million tree blocks has 9 MB."""

_DECODER: Final = msgspec.msgpack.Decoder(CacheState)


class ReportFeed:
    """Reads the reports of one engine, for the gateway with this id."""

    def __init__(self, engine: EngineConfig, upstream: UpstreamConfig, gateway_id: str) -> None:
        self._requests = EngineRequests(engine, upstream, held_s=upstream.report_wait_ms / 1e3)
        self._query = urlencode({"wait_ms": upstream.report_wait_ms, "gateway": gateway_id})

    async def next(self, epoch: str | None, cursor: int | None) -> CacheState:
        """The report since a cursor of `epoch`, once there is news; without them a snapshot.

        Raises what `EngineRequests.get` raises, and `msgspec.DecodeError`.
        """
        query = self._query
        if cursor is not None and epoch is not None:
            query = f"{query}&{urlencode({'since': cursor, 'epoch': epoch})}"
        return _DECODER.decode(
            await self._requests.get(f"{PATH}?{query}", accept=b"application/msgpack", max_bytes=MAX_BYTES)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the connection."""
        self._requests.__exit__()


class _RefusalError(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """An error in OpenAI's shape, which the plugin's route answers with."""

    error: _RefusalError


def report_problem(error: Exception) -> str | None:
    """Why an engine with our plugin has no usable report; None for an engine without the plugin."""
    if not isinstance(error, RefusedRequestError):
        return str(error) or type(error).__name__
    try:
        message = msgspec.json.decode(error.body, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = None
    if error.status in {404, 405} or (error.status == UnsupportedError.status and message is None):
        return None
    return message or str(error)
