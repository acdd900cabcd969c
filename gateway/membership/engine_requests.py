"""The gateway's own requests to engines (probes, reports, counters, tokenizers), and the meaning of their failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self
from urllib.parse import urlencode

import msgspec

from plait.backends.errors import EngineError, EngineTimeoutError, EngineUnreachableError, UnsupportedError
from plait.backends.http.client import HttpClient, Timeouts
from plait.backends.protocol.cache_state import CacheState
from plait.gateway.config.sections import EngineConfig, UpstreamConfig

MAX_BYTES: Final = 16 * 2**20
"""The default limit of an answer. An OpenAPI document has some 200 kB."""

Headers = list[tuple[bytes, bytes]]
Body = bytes | bytearray


class RefusedRequestError(Exception):
    """The engine answered with another status than 200."""

    def __init__(self, request: str, status: int, body: Body, *, has_key: bool) -> None:
        problem = f"status {status}"
        if status in {401, 403}:
            problem = f"the engine {'refuses our key' if has_key else 'asks for a key'}: see api_key"
        super().__init__(f"{request}: {problem}")
        self.status = status
        self.body = body


FAILURES: Final = (EngineError, RefusedRequestError, msgspec.DecodeError, UnicodeDecodeError)
"""No answer, a refusal, or an answer that is not what was asked for."""


class EngineRequests:
    """Sends requests to one engine, over separate connections, so that no call waits for them.

    The engine may take `probe_timeout_s` to answer, plus `held_s` for a long poll.
    """

    def __init__(self, engine: EngineConfig, upstream: UpstreamConfig, held_s: float = 0.0) -> None:
        probe_s = upstream.probe_timeout_s
        timeouts = Timeouts(connect_s=upstream.connect_timeout_s, first_byte_s=held_s + probe_s, idle_s=probe_s)
        self._engine = engine
        self._upstream = upstream
        self._http = HttpClient(engine.url, name=engine.name, timeouts=timeouts, max_idle=1)
        self._key: Headers = [(b"authorization", f"Bearer {engine.api_key}".encode())] if engine.api_key else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def holding(self, held_s: float) -> EngineRequests:
        """Requests to the same engine with a longer time-out."""
        return EngineRequests(self._engine, self._upstream, held_s)

    async def get(self, path: str, *, accept: bytes = b"application/json", max_bytes: int = MAX_BYTES) -> Body:
        """The body of the answer to a GET.

        Raises `RefusedRequestError`; `EngineError`, such as `EngineGarbledError` beyond `max_bytes`.
        """
        return await self._sent("GET", path, [(b"accept", accept)], b"", max_bytes)

    async def post(self, path: str, fields: Mapping[str, Any]) -> Body:
        """The body of the answer to a POST of JSON. Raises the same."""
        headers = [(b"content-type", b"application/json")]
        return await self._sent("POST", path, headers, msgspec.json.encode(fields), MAX_BYTES)

    async def hint(self, error: Exception) -> str | None:
        """A hint for the operator that the error does not give: the engine's port speaks TLS."""
        is_odd = isinstance(error, RefusedRequestError) and error.status == 400  # some TLS servers answer so in clear
        is_odd |= isinstance(error, EngineError) and not isinstance(error, EngineUnreachableError)
        if is_odd and self._engine.url.startswith("http:") and await self._http.speaks_tls():
            return "its port speaks TLS: its url should begin with https://"
        return None

    async def _sent(self, method: str, path: str, headers: Headers, body: bytes, max_bytes: int) -> Body:
        response = await self._http.request(method, path, self._key + headers, body)
        try:
            answer = await response.gather(max_bytes)
        finally:
            response.abort()
        if response.status != 200:
            request = f"{method} {path.partition('?')[0]}"
            raise RefusedRequestError(request, response.status, answer, has_key=bool(self._key))
        return answer


def is_silence(error: Exception) -> bool:
    """Whether the engine did not answer in time, rather than with an error."""
    return isinstance(error, EngineTimeoutError) or (
        isinstance(error, EngineError) and error.cause == "connect_timeout"
    )


def probe_cause(error: Exception) -> str:
    """The cause of a failed probe, for log and metrics."""
    if isinstance(error, RefusedRequestError):
        return "refused_key" if error.status in {401, 403} else f"status_{error.status}"
    return error.cause if isinstance(error, EngineError) else "garbled"


REPORT_PATH: Final = "/cache_state"

MAX_REPORT_BYTES: Final = 2**27
"""The largest report. A snapshot of a million tree blocks has 9 MB."""

_DECODER: Final = msgspec.msgpack.Decoder(CacheState)


class ReportFeed:
    """Long-polls the reports of one engine; of its `rank` if the address has several."""

    def __init__(self, engine: EngineConfig, upstream: UpstreamConfig, gateway_id: str, rank: int = 0) -> None:
        self._requests = EngineRequests(engine, upstream, held_s=upstream.probe_interval_s)
        asked = {"wait_ms": round(upstream.probe_interval_s * 1e3), "gateway": gateway_id}
        self._query = urlencode(asked | ({"rank": rank} if rank else {}))

    async def next(self, epoch: str | None, cursor: int | None) -> CacheState:
        """The next report: the changes since `cursor`, once there are some, or a snapshot without a cursor.

        Raises what `EngineRequests.get` raises, and `msgspec.DecodeError`.
        """
        query = self._query
        if cursor is not None and epoch is not None:
            query = f"{query}&{urlencode({'since': cursor, 'epoch': epoch})}"
        path, form = f"{REPORT_PATH}?{query}", b"application/msgpack"
        return _DECODER.decode(await self._requests.get(path, accept=form, max_bytes=MAX_REPORT_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._requests.__exit__()


class _RefusalError(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """An error in OpenAI's shape, which the plugin's route answers with."""

    error: _RefusalError


def report_problem(error: Exception) -> str | None:
    """Why an engine with Plait's adapter has no usable report; None for an engine without the adapter."""
    if not isinstance(error, RefusedRequestError):
        return str(error) or type(error).__name__
    try:
        message = msgspec.json.decode(error.body, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = None
    if error.status in {404, 405} or (error.status == UnsupportedError.status and message is None):
        return None
    return message or str(error)
