"""The headers that pass between clients and engines. Those of one hop, of Plait, and secrets stay on their side."""

from __future__ import annotations

import time
from collections.abc import Container
from email.utils import parsedate_to_datetime

from plait.gateway.asgi import Headers

_ONE_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"x-request-id",
    )
)  # fmt: skip
"""RFC 9110, 7.6.1; and headers that Plait sets itself."""

_NOT_TO_ENGINES = _ONE_HOP | {
    b"host",
    b"expect",
    b"accept-encoding",
    b"authorization",
    b"cookie",
    b"x-api-key",
    b"api-key",
}
_NOT_TO_CLIENTS = _ONE_HOP | {
    b"date", b"server", b"set-cookie", b"location", b"content-location", b"www-authenticate", b"alt-svc", b"via",
    b"strict-transport-security", b"retry-after", b"x-should-retry",
}  # fmt: skip
_OURS = b"plait-"
_USUAL = frozenset((b"keep-alive", b"close"))


def to_engine(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The client's headers that an engine gets."""
    return _passed(headers, _NOT_TO_ENGINES)


def to_client(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The engine's headers that a client gets. An engine cannot set a header of Plait's."""
    return _passed(headers, _NOT_TO_CLIENTS)


def _passed(headers: Headers, refused: Container[bytes]) -> list[tuple[bytes, bytes]]:
    passed = [item for item in headers if item[0] not in refused and item[0][:6] != _OURS]
    named = [value for name, value in headers if name == b"connection" and value.lower() not in _USUAL]
    if not named:
        return passed
    hop = {name.strip().lower() for value in named for name in value.split(b",")}
    return [item for item in passed if item[0] not in hop]


def retry_after_s(headers: Headers) -> float | None:
    """The seconds that the sender asks to be left alone; None if it does not ask. It may name a date."""
    given = next((value.strip() for name, value in headers if name == b"retry-after"), b"")
    if given.isdigit():
        return float(given[:9])
    try:
        return max(0.0, parsedate_to_datetime(given.decode("latin-1")).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
