"""The adapters' routes inside an engine's own API server: the requests' queries and bodies, and the answers' forms.

`GET /cache_state` (docs/design/residency.md):

    since, epoch   cursor and epoch of the latest known report; without `since` the answer is a snapshot
    wait_ms        how long the answer may wait for a change (at most a minute)
    gateway        the id of the gateway that asks: the answer leaves out this gateway's calls
    rank           the data-parallel rank that is asked, from 0 (the default)

The answer is msgpack if `Accept` names it, else JSON.

`POST /call_objectives` is described in `plait.backends.protocol.call_objectives`, `GET /plait/tokenizer` in
`plait.backends.protocol.tokenizer_files`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec

from plait.backends.adapter.engine_tokenizer import EngineTokenizer, with_fields
from plait.backends.errors import BodyTooLargeError, CallerError, MethodNotAllowedError, NotFoundError, PlaitError
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.call_objectives import MAX_BODY_BYTES, ChangesAnswer, read_changes
from plait.backends.protocol.call_objectives import PATH as CALL_OBJECTIVES
from plait.backends.protocol.tokenizer_files import PATH as TOKENIZER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """The request's whole body. Raises `CallerError` beyond the limit, or if the client has gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise CallerError("the client has gone")
        body += bytes(message.get("body", b""))
        if len(body) > limit_bytes:
            raise BodyTooLargeError(f"the body has more than {limit_bytes} bytes")
        if not message.get("more_body", False):
            return body


async def send_answer(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


CACHE_STATE = "/cache_state"

MAX_WAIT_MS = 60_000

ANSWER_DEADLINE_S = 20.0
"""Far longer than any iteration, because a scheduler answers between iterations. Without a limit, a stopped scheduler
would leave requests waiting, and they would keep the API server from stopping.
"""


@dataclass(frozen=True, slots=True)
class ReportQuery:
    """The query of `GET /cache_state`. `wait_s` is how long the answer may wait for a change."""

    since: int | None
    epoch: str | None
    wait_s: float
    gateway: str | None = None
    rank: int = 0


Report = Callable[[Scope, ReportQuery], Awaitable[bytes]]
"""The report as msgpack; raises `PlaitError`."""


async def answer_cache_state(scope: Scope, send: Send, report: Report, tokenizer: bytes, ranks: int) -> None:
    """Answer one request. `tokenizer` is the encoded fingerprint of the engine's tokenizer."""
    try:
        body, content_type = await _answered(scope, report, tokenizer, ranks)
        await send_answer(send, 200, body, content_type)
    except PlaitError as error:
        await send_answer(send, error.status, error.body())


async def _answered(scope: Scope, report: Report, tokenizer: bytes, ranks: int) -> tuple[bytes, bytes]:
    """The body and its content type."""
    if scope["method"] != "GET":
        raise CallerError(f"{CACHE_STATE} takes GET requests only")
    query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    asked = report_query(query, ranks)
    encoded = with_fields(await report(scope, asked), tokenizer, rank=asked.rank, ranks=ranks)
    if b"msgpack" in dict(scope["headers"]).get(b"accept", b""):
        return encoded, b"application/msgpack"
    return msgspec.json.encode(msgspec.msgpack.decode(encoded, type=CacheState)), b"application/json"


def report_query(query: Mapping[str, str], ranks: int) -> ReportQuery:
    """The query by its names. Raises `CallerError` for what is no number, and for a rank that the server lacks."""
    since, wait_ms = _integer(query.get("since"), "since"), _integer(query.get("wait_ms"), "wait_ms") or 0
    wait_s, rank = min(wait_ms, MAX_WAIT_MS) / 1e3, read_rank(query.get("rank"), "rank", ranks) or 0
    return ReportQuery(since, query.get("epoch"), wait_s, query.get("gateway"), rank)


def _integer(value: str | None, name: str) -> int | None:
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,18}", value):
        raise CallerError(f"'{name}' must be a whole number, not {value[:80]!r}", param=name)
    return int(value)


def read_rank(value: str | None, name: str, ranks: int) -> int | None:
    """The rank in a request's field `name`. Raises `CallerError` for one that the server lacks."""
    rank = _integer(value, name)
    if rank is not None and rank >= ranks:
        raise CallerError(f"this server has no data-parallel rank {rank}, but 0 to {ranks - 1}", param=name)
    return rank


Change = Callable[[bytes], Awaitable[int]]
"""Passes a valid body to the scheduler. Returns how many of the named calls the scheduler has. Raises `PlaitError`."""

Access = Callable[[Scope], Change]
"""Checks a request's API key and the engine before the body is read; raises `PlaitError`."""


async def answer_call_objectives(scope: Scope, receive: Receive, send: Send, access: Access) -> None:
    try:
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"{CALL_OBJECTIVES} takes POST requests only")
        change = access(scope)
        body = await read_body(receive, MAX_BODY_BYTES)
        read_changes(body, AnnotationReader())
        await send_answer(send, 200, msgspec.json.encode(ChangesAnswer(await change(body))))
    except PlaitError as error:
        await send_answer(send, error.status, error.body())


FindTokenizer = Callable[[Scope], EngineTokenizer | None]
"""Checks a request's API key and returns the engine's tokenizer; raises `PlaitError`."""


async def answer_tokenizer(scope: Scope, send: Send, find: FindTokenizer, fingerprint: bytes) -> None:
    """Answer one request. `fingerprint` is that of the tokenizer, encoded."""
    try:
        await send_answer(send, 200, await _offer(scope, find, fingerprint), b"application/msgpack")
    except PlaitError as error:
        await send_answer(send, error.status, error.body())
    except Exception as error:  # noqa: BLE001 - some models bring the code of their tokenizer
        refusal = NotFoundError(f"The tokenizer of this engine cannot be offered: {error!r}")
        await send_answer(send, refusal.status, refusal.body())


async def _offer(scope: Scope, find: FindTokenizer, fingerprint: bytes) -> bytes:
    """The tokenizer's files. A thread writes and reads them, which takes up to a second."""
    if scope["method"] != "GET":
        raise MethodNotAllowedError(f"{TOKENIZER} takes GET requests only")
    tokenizer = find(scope)
    if tokenizer is None:
        raise NotFoundError("This engine runs without a tokenizer.")
    return await asyncio.to_thread(tokenizer.offer, fingerprint)
