"""Requests and their retries as generators, without a socket. The two transports drive them.

A flow yields requests and pauses. The transport sends each answer into the flow, or throws its own error into it. In
the end the flow returns its result. So retries and long waits are written once, for blocking and asynchronous use.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from plait.client.errors import (
    AnswerError,
    ClientError,
    ConnectionFailedError,
    GetTimeoutError,
    VariableFailedError,
    answer_error,
)

T = TypeVar("T")

POLL_S = 50.0
"""The longest wait of one request for a value: proxies commonly cut connections that are silent for 60 s."""
LONGEST_PAUSE_S = 30.0

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_TEMPORARY = frozenset({502, 503, 504})
_TOO_MANY = 429


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request below the base URL. Its answer may take `wait_s` longer than the client's time-out.

    A `repeatable` request may be retried when its answer was lost. If the retry is refused with the code `done_code`,
    the first request had arrived.
    """

    method: str
    path: str
    body: Mapping[str, object] | None = None
    wait_s: float = 0.0
    repeatable: bool = True
    done_code: str | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of `s` seconds."""

    s: float


@dataclass(frozen=True, slots=True)
class Retries:
    """At most `most` retries. The first pause is `first_pause_s`, and each further one is twice as long."""

    most: int = 2
    first_pause_s: float = 0.25

    def pause_s(self, attempt: int, asked_s: float | None = None) -> float:
        """Seconds to wait after attempt number `attempt`, from 0. If the gateway asks for `asked_s`, it counts instead.

        At most `LONGEST_PAUSE_S`.
        """
        pause_s = self.first_pause_s * 2**attempt if asked_s is None else asked_s
        return min(pause_s, LONGEST_PAUSE_S)


Flow = Generator[Request | Pause, httpx.Response | None, T]


class _Value(msgspec.Struct, frozen=True):
    value: str


def answered(request: Request, retries: Retries) -> Flow[bytes]:
    """The body of the request's answer. Raises `AnswerError`, or `ConnectionFailedError` if there was no answer."""
    lost = False
    for attempt in range(retries.most + 1):
        last = attempt == retries.most
        try:
            response = yield request
        except httpx.TransportError as error:
            sent = not isinstance(error, _NEVER_SENT)
            if last or (sent and not request.repeatable):
                raise connection_failed(request, error) from error
            lost |= sent
            yield Pause(retries.pause_s(attempt))
            continue
        assert response is not None, "a request is answered with a response"
        if response.is_success:
            return response.content
        refusal = answer_error(response)
        if lost and refusal.code is not None and refusal.code == request.done_code:
            return b""
        asked_s = _retry_after_s(response)
        if last or not _is_temporary(response, request, asked_s):
            raise refusal
        yield Pause(retries.pause_s(attempt, asked_s))
    raise AssertionError("the last attempt returns or raises")


def got(request: Request, variable: str, timeout_s: float, retries: Retries) -> Flow[str]:
    """The variable's value. The `get` is repeated until the value comes or `timeout_s` have passed.

    Raises `GetTimeoutError`, `VariableFailedError`, `AnswerError` or `ConnectionFailedError`.
    """
    ends_s = time.monotonic() + timeout_s
    while True:
        left_s = max(ends_s - time.monotonic(), 0.001)
        wait_s = min(left_s, POLL_S)
        asked = Request(request.method, request.path, {**(request.body or {}), "timeout_s": wait_s}, wait_s)
        try:
            body = yield from answered(asked, retries)
        except AnswerError as error:
            if error.code == "get_timeout" and left_s > wait_s:
                continue
            raise failed_get(error, variable, timeout_s) from error
        return msgspec.json.decode(body, type=_Value).value


def failed_get(error: AnswerError, variable: str, timeout_s: float) -> ClientError:
    """The exception for a refused `get`."""
    if error.code == "get_timeout":
        return GetTimeoutError(variable, timeout_s)
    if error.code == "variable_failed":
        return VariableFailedError(variable, error.causes)
    return error


def connection_failed(request: Request, error: httpx.TransportError) -> ConnectionFailedError:
    """The exception for a transport's failure."""
    return ConnectionFailedError(f"{request.method} {request.path}: {str(error) or type(error).__name__}")


def _is_temporary(response: httpx.Response, request: Request, asked_s: float | None) -> bool:
    """Whether the same request may succeed later, and is safe to repeat."""
    if response.status_code == _TOO_MANY:
        return asked_s is not None  # a tenant's own limit has no retry-after: waiting does not help
    return response.status_code in _TEMPORARY and (request.repeatable or asked_s is not None)


def _retry_after_s(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None
