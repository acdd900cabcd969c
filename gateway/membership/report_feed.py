"""One engine's cache-state reports, read over a connection of the data path's client.

A busy engine has news at every iteration, so this is the gateway's most frequent request: httpx would take five times
as long for one.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

import msgspec

from plait.backends.errors import EngineError, UnsupportedError
from plait.backends.http.client import HttpClient, Timeouts
from plait.backends.protocol.cache_state import CacheState
from plait.gateway.config.sections import EngineConfig, UpstreamConfig
from plait.gateway.membership.probes import key_problem, probe_error, trust

PATH: Final = "/cache_state"

MAX_BYTES: Final = 2**27
"""Of a report. A snapshot of a million tree blocks has 9 MB."""

_DECODER: Final = msgspec.msgpack.Decoder(CacheState)


class RefusedReportError(Exception):
    """The engine answered with another status than 200."""

    def __init__(self, status: int, body: bytes, *, has_key: bool) -> None:
        super().__init__(key_problem(PATH, has_key=has_key) if status in {401, 403} else f"GET {PATH}: status {status}")
        self.status = status
        self.body = body


class ReportFeed:
    """Reads the reports of one engine, for the gateway with this id."""

    def __init__(self, engine: EngineConfig, upstream: UpstreamConfig, gateway_id: str) -> None:
        timeouts = Timeouts(
            connect_s=upstream.connect_timeout_s,
            first_byte_s=upstream.report_wait_ms / 1e3 + upstream.probe_timeout_s,
            idle_s=upstream.probe_timeout_s,
        )
        tls = trust() if engine.url.startswith("https") else None
        self._http = HttpClient(engine.url, name=engine.name, timeouts=timeouts, max_idle=1, tls=tls)
        self._query = urlencode({"wait_ms": upstream.report_wait_ms, "gateway": gateway_id})
        self._headers = [(b"accept", b"application/msgpack")]
        if engine.api_key:
            self._headers.append((b"authorization", f"Bearer {engine.api_key}".encode()))

    async def next(self, epoch: str | None, cursor: int | None) -> CacheState:
        """The report since a cursor of `epoch`, once there is news; without them a snapshot.

        Raises `EngineTimeoutError` and other `EngineError`s, `RefusedReportError`, `msgspec.DecodeError`.
        """
        query = self._query
        if cursor is not None and epoch is not None:
            query = f"{query}&{urlencode({'since': cursor, 'epoch': epoch})}"
        answer = await self._http.get(f"{PATH}?{query}", self._headers)
        body = await answer.gather(MAX_BYTES)
        if answer.status != 200:
            raise RefusedReportError(answer.status, bytes(body), has_key=len(self._headers) > 1)
        return _DECODER.decode(body)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


class _RefusalError(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """An error in OpenAI's shape, which the plugin's route answers with."""

    error: _RefusalError


def report_problem(error: Exception) -> str | None:
    """Why an engine with our plugin has no usable report; None for an engine without the plugin."""
    if isinstance(error, EngineError):
        return str(error)
    if not isinstance(error, RefusedReportError):
        return probe_error(error)
    try:
        message = msgspec.json.decode(error.body, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = None
    if error.status in {404, 405} or (error.status == UnsupportedError.status and message is None):
        return None
    return message or str(error)
