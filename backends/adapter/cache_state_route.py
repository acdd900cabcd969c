"""`GET /cache_state` inside an engine's own API server: the request's query and the answer's form.

See docs/design/residency.md.

    since, epoch   cursor and epoch of the latest known report; without `since` the answer is a snapshot
    wait_ms        how long the answer may be held back while nothing changes (at most a minute)

The answer is msgpack if `Accept` names it, else JSON.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import parse_qs

import msgspec

from plait.backends.adapter.asgi import Scope, Send, send_answer
from plait.backends.adapter.engine_tokenizer import with_tokenizer
from plait.backends.errors import CallerError, PlaitError
from plait.backends.protocol.cache_state import CacheState

PATH = "/cache_state"

MAX_WAIT_MS = 60_000

ANSWER_DEADLINE_S = 20.0
"""Far longer than any iteration, because a scheduler answers between iterations. A stopped scheduler never answers, and
a waiting request would keep the API server from stopping.
"""


@dataclass(frozen=True, slots=True)
class ReportQuery:
    """A request's query: cursor, epoch, and how long the answer may be held back."""

    since: int | None
    epoch: str | None
    wait_s: float


Report = Callable[[Scope, ReportQuery], Awaitable[bytes]]
"""The report as msgpack; raises `PlaitError`."""


async def answer(scope: Scope, send: Send, report: Report, tokenizer: bytes) -> None:
    """Answer one request. `tokenizer` is the encoded fingerprint of the engine's tokenizer."""
    try:
        body, content_type = await _answered(scope, report, tokenizer)
        await send_answer(send, 200, body, content_type)
    except PlaitError as error:
        await send_answer(send, error.status, error.body())


async def _answered(scope: Scope, report: Report, tokenizer: bytes) -> tuple[bytes, bytes]:
    """The body and its content type."""
    if scope["method"] != "GET":
        raise CallerError(f"{PATH} takes GET requests only")
    query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    since, wait_ms = _integer(query, "since"), _integer(query, "wait_ms") or 0
    encoded = await report(scope, ReportQuery(since, query.get("epoch"), min(wait_ms, MAX_WAIT_MS) / 1e3))
    encoded = with_tokenizer(encoded, tokenizer)
    if b"msgpack" in dict(scope["headers"]).get(b"accept", b""):
        return encoded, b"application/msgpack"
    return msgspec.json.encode(msgspec.msgpack.decode(encoded, type=CacheState)), b"application/json"


def _integer(query: dict[str, str], name: str) -> int | None:
    value = query.get(name)
    if value is None:
        return None
    if not value.isdecimal():
        raise CallerError(f"'{name}' must be a whole number, not {value!r}", param=name)
    return int(value)
