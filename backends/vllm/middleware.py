"""`GET /cache_state` in vLLM's API server, as ASGI middleware for `--middleware`: the report of DESIGN 4.7.

    since, epoch   cursor and epoch of the report known so far; without them the answer is a snapshot
    wait_ms        how long the answer may be held back while nothing changes (at most a minute)

msgpack if `Accept` names it, else JSON. If the engine has an API key, the report is readable with it only.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from backends.cache_state import CacheState
from backends.errors import (
    AuthenticationError,
    CallerError,
    EngineError,
    EngineTimeoutError,
    PlaitError,
    UnsupportedError,
)
from backends.vllm.launch import SCHEDULER
from backends.vllm.plugin import METHOD

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_WAIT_MS = 60_000

ANSWER_DEADLINE_S = 20.0
"""Far above any iteration, between which the core answers. One that was stopped never does, and a request that waited
for it would keep the API server from stopping too.
"""


class CacheStateMiddleware:
    """Answers its own path and lets everything else through."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, by the rules of ASGI."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) != "/cache_state":
            await self._app(scope, receive, send)
            return
        try:
            await _send(send, 200, *await _answer(scope))
        except PlaitError as error:
            await _send(send, error.status, error.body(), b"application/json")


async def _answer(scope: Scope) -> tuple[bytes, bytes]:
    """The body and its type."""
    if scope["method"] != "GET":
        raise CallerError("/cache_state is read with GET")
    headers = dict(scope["headers"])
    state = scope["app"].state
    _authenticate(headers.get(b"authorization", b""), _keys(state))
    query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    since, wait_ms = _integer(query, "since"), _integer(query, "wait_ms") or 0
    report = await _report(_core(state.engine_client), since, query.get("epoch"), min(wait_ms, MAX_WAIT_MS) / 1e3)
    if b"msgpack" in headers.get(b"accept", b""):
        return report, b"application/msgpack"
    return msgspec.json.encode(msgspec.msgpack.decode(report, type=CacheState)), b"application/json"


def _core(engine_client: Any) -> Any:
    """The API server's client of the engine core, if Plait's scheduler runs there."""
    scheduler = engine_client.vllm_config.scheduler_config.scheduler_cls
    if scheduler != SCHEDULER:
        raise UnsupportedError(f"Plait's scheduler does not run in this engine: it needs --scheduler-cls {SCHEDULER}")
    if engine_client.errored:
        raise EngineError("the engine core has died", code="engine_dead")
    return engine_client.engine_core


async def _report(core: Any, since: int | None, epoch: str | None, wait_s: float) -> bytes:
    """The engine core's report; one that it held back in vain is given up and asked for anew."""
    report: bytes
    if wait_s > 0 and since is not None:
        try:
            async with asyncio.timeout(wait_s):
                report = await core.call_utility_async(METHOD, since, epoch, True)
                return report
        except TimeoutError:
            pass
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            report = await core.call_utility_async(METHOD, since, epoch, False)
    except TimeoutError as error:
        raise EngineTimeoutError(f"the engine core did not answer within {ANSWER_DEADLINE_S:g} s") from error
    return report


def _keys(state: Any) -> list[str]:
    """The engine's API keys, found as vLLM finds them."""
    keys = getattr(getattr(state, "args", None), "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in ([keys] if isinstance(keys, str) else keys) if key]


def _authenticate(authorization: bytes, keys: list[str]) -> None:
    scheme, _, token = authorization.partition(b" ")
    valid = [hmac.compare_digest(token, key.encode()) for key in keys]
    if keys and not (scheme.lower() == b"bearer" and any(valid)):
        raise AuthenticationError("the engine's API key is needed")


def _integer(query: dict[str, str], name: str) -> int | None:
    value = query.get(name)
    if value is None:
        return None
    if not value.isdecimal():
        raise CallerError(f"{name} is a whole number, not {value!r}", param=name)
    return int(value)


async def _send(send: Send, status: int, body: bytes, content_type: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
