"""The link to an engine: its connections, its API key, and the allow-lists of forwarded headers.

A header that is not listed is not forwarded: it may have secrets, addresses of engines, or CORS permissions.
`gateway/config/values.py` has the headers that can never be listed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from plait.backends.http.client import HttpClient
from plait.gateway.asgi import Headers

TO_ENGINES = frozenset((
    b"content-type", b"accept",  # what the body is, and what the answer may be
    b"traceparent", b"tracestate",  # W3C trace context: vLLM and SGLang go on with the client's trace
    b"x-smg-routing-key",  # SGLang: the session, for its metrics and its routing-key policy
    b"anthropic-version", b"anthropic-beta", b"openai-beta",  # versions, which servers of these APIs may ask for
))  # fmt: skip
"""Also sent: `x-request-id`, `RANK_HEADER` where an address has several ranks, and `authorization` for an engine with a
key of its own or an open gateway."""

TO_CLIENTS = frozenset((
    b"content-type", b"content-encoding",  # what the body is: it passes as it comes
    b"metadata",  # vLLM: the shapes and types of embeddings that come as bytes
    b"cache-control",  # engines ask caches not to keep a stream
    b"openai-processing-ms", b"openai-version",  # OpenAI's, which its SDKs show
    b"traceparent", b"tracestate",  # where the engine's part of a trace is found
))  # fmt: skip
"""Also sent: `x-request-id`, `retry-after`, `x-accel-buffering` of streams, and headers that begin with `plait-`, which
the gateway writes itself."""

TOO_EARLY = frozenset((408, 425, 429))
"""Statuses below 500 that are not the caller's fault."""

NO_ACCESS = frozenset((401, 403))
"""Statuses about the key that an engine was sent: the gateway's fault, unless the key was the client's."""


@dataclass(frozen=True, slots=True)
class PassedHeaders:
    """The names of the forwarded headers, in lower case."""

    to_engines: frozenset[bytes] = TO_ENGINES
    to_clients: frozenset[bytes] = TO_CLIENTS

    @classmethod
    def with_more(cls, to_engines: Iterable[str], to_clients: Iterable[str]) -> PassedHeaders:
        """The default lists with these names added."""
        return cls(
            TO_ENGINES | {name.encode() for name in to_engines}, TO_CLIENTS | {name.encode() for name in to_clients}
        )


BY_DEFAULT = PassedHeaders()


def retry_after_s(headers: Headers) -> float | None:
    """The `Retry-After` in seconds, which may be given as a date; None without a valid one."""
    given = next((value.strip() for name, value in headers if name == b"retry-after"), b"")
    if given.isdigit():
        return float(given[:9])
    try:
        return max(0.0, parsedate_to_datetime(given.decode("latin-1")).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class EngineLink:
    """`authorization` is the header's value for this engine; None if no key is configured for it.

    `rank` is the header that names the data-parallel rank; empty if the engine is its address's only one.
    """

    client: HttpClient
    authorization: bytes | None = None
    passed: PassedHeaders = BY_DEFAULT
    rank: Headers = ()

    def refused_ours(self, status: int, *, clients: bool) -> bool:
        """Whether this status refuses what the gateway has for a key. `clients`: it forwards its clients' own keys."""
        return status in NO_ACCESS and (self.authorization is not None or not clients)
