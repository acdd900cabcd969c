"""Requests and their retries as generators, without a socket. The two transports drive them.

A flow yields requests and pauses. The transport sends each answer into the flow, or throws httpx's error into it. The
flow returns the result. So retries and long waits are written once, for blocking and asynchronous use.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx

from plait.client.errors import (
    AnswerError,
    ClientError,
    ConnectionFailedError,
    GetTimeoutError,
    SkippedError,
    VariableFailedError,
    answer_error,
)

T = TypeVar("T")

POLL_S = 50.0
"""The longest wait of one request for a value: proxies commonly cut connections that are silent for 60 s."""
LONGEST_PAUSE_S = 30.0

_TOO_MANY = 429
_TEMPORARY = frozenset({502, 503, 504})
MAY_PASS = _TEMPORARY | {_TOO_MANY}
"""Statuses after which the same request may succeed."""
_NO_VALUE: Mapping[str, type[VariableFailedError]] = {
    "variable_failed": VariableFailedError,
    "not_computed": VariableFailedError,
    "skipped": SkippedError,
}
"""The codes of a get whose variable will never have a value."""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request below the base URL. The answer may take `wait_s` longer than the client's time-out.

    Every request may be sent again: the gateway recognises a repeated program by its names, a session by its id.
    """

    method: str
    path: str
    body: Mapping[str, object] | None = None
    wait_s: float = 0.0


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
        """Seconds to wait after attempt number `attempt`, from 0, or else the `asked_s` of the gateway's retry-after.

        At most `LONGEST_PAUSE_S`.
        """
        pause_s = self.first_pause_s * 2**attempt if asked_s is None else asked_s
        return min(pause_s, LONGEST_PAUSE_S)


Flow = Generator[Request | Pause, httpx.Response | None, T]


def responded(request: Request, retries: Retries) -> Flow[httpx.Response]:
    """The request's answer, of any status. Raises `ConnectionFailedError` if there was none."""
    for attempt in range(retries.most + 1):
        last = attempt == retries.most
        try:
            response = yield request
        except httpx.TransportError as error:
            if last:
                raise connection_failed(request, error) from error
            yield Pause(retries.pause_s(attempt))
            continue
        assert response is not None, "a request is answered with a response"
        asked_s = _retry_after_s(response)
        if last or not _is_temporary(response, asked_s):
            return response
        yield Pause(retries.pause_s(attempt, asked_s))
    raise AssertionError("the last attempt returns or raises")


def answered(request: Request, retries: Retries) -> Flow[bytes]:
    """The body of the request's answer. Raises `AnswerError`, or `ConnectionFailedError` if there was no answer."""
    response = yield from responded(request, retries)
    if not response.is_success:
        raise answer_error(response)
    return response.content


def failed_get(error: AnswerError, variable: str, timeout_s: float) -> ClientError:
    if error.code == "get_timeout":
        return GetTimeoutError(variable, timeout_s)
    kind = _NO_VALUE.get(error.code or "")
    return error if kind is None else kind(variable, error.causes)


def connection_failed(request: Request, error: httpx.TransportError) -> ConnectionFailedError:
    return ConnectionFailedError(f"{request.method} {_url(request, error)}: {str(error) or type(error).__name__}")


def _url(request: Request, error: httpx.TransportError) -> str:
    """The request's whole address, if httpx says it; it has no credentials."""
    try:
        url = error.request.url
    except RuntimeError:
        return request.path
    return f"{url.scheme}://{url.netloc.decode()}{url.path}"


def _is_temporary(response: httpx.Response, asked_s: float | None) -> bool:
    """Whether the same request may succeed later."""
    if response.status_code == _TOO_MANY:
        return asked_s is not None  # a tenant's own limit has no retry-after: waiting does not help
    return response.status_code in _TEMPORARY


def _retry_after_s(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None
