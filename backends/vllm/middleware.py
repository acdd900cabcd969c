"""Plait's routes in vLLM's API server, as ASGI middleware for `--middleware`.

`GET /cache_state`, `POST /call_objectives` and `GET /plait/tokenizer`. If the engine has an API key, all need it.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from plait.backends.adapter import cache_state_route, call_objectives_route, tokenizer_route
from plait.backends.adapter.asgi import Receive, Scope, Send
from plait.backends.adapter.cache_state_route import ANSWER_DEADLINE_S, ReportQuery
from plait.backends.adapter.cache_state_route import PATH as CACHE_STATE
from plait.backends.adapter.engine_tokenizer import EngineTokenizer, read_fingerprint
from plait.backends.errors import AuthenticationError, EngineError, EngineTimeoutError, UnsupportedError
from plait.backends.protocol.call_objectives import PATH as CALL_OBJECTIVES
from plait.backends.protocol.tokenizer_files import PATH as TOKENIZER
from plait.backends.vllm.launch import SCHEDULER
from plait.backends.vllm.plugin import CHANGE_METHOD, METHOD
from plait.backends.vllm.served_tokenizer import served_tokenizer


class CacheStateMiddleware:
    """Answers the three routes and passes every other request on."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._tokenizer: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request. Before the first, when the server starts, the tokenizer is read."""
        if self._tokenizer is None:
            self._tokenizer = read_fingerprint(lambda: served_tokenizer(scope["app"].state))
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else None
        if path == CACHE_STATE:
            await cache_state_route.answer(scope, send, _report, self._tokenizer)
        elif path == CALL_OBJECTIVES:
            await call_objectives_route.answer(scope, receive, send, _access)
        elif path == TOKENIZER:
            await tokenizer_route.answer(scope, send, _tokenizer, self._tokenizer)
        else:
            await self._app(scope, receive, send)


async def _report(scope: Scope, query: ReportQuery) -> bytes:
    """The engine core's report. If nothing changes during the wait, ask again without waiting."""
    core = _allowed_core(scope)
    report: bytes
    if query.wait_s > 0 and query.since is not None:
        try:
            async with asyncio.timeout(query.wait_s):
                report = await core.call_utility_async(METHOD, query.since, query.epoch, True)
                return report
        except TimeoutError:
            pass
    report = await _answered(core, METHOD, query.since, query.epoch, False)
    return report


def _access(scope: Scope) -> call_objectives_route.Change:
    """The way for changed objectives to the engine core."""
    core = _allowed_core(scope)

    async def change(body: bytes) -> int:
        known: int = await _answered(core, CHANGE_METHOD, body.decode())
        return known

    return change


async def _answered(core: Any, method: str, *arguments: Any) -> Any:
    """The engine core's answer, which comes between two iterations."""
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await core.call_utility_async(method, *arguments)
    except TimeoutError as error:
        raise EngineTimeoutError(f"the engine core did not answer within {ANSWER_DEADLINE_S:g} s") from error


def _tokenizer(scope: Scope) -> EngineTokenizer | None:
    """The tokenizer. Raises `PlaitError` for a request without the key, and as `served_tokenizer` does."""
    return served_tokenizer(_allowed(scope))


def _allowed_core(scope: Scope) -> Any:
    """The client of the engine core. Raises `PlaitError` for a request without the key, or if there is no scheduler."""
    return _core(_allowed(scope).engine_client)


def _allowed(scope: Scope) -> Any:
    """The application's state. Raises `AuthenticationError` for a request without the key."""
    state = scope["app"].state
    _authenticate(dict(scope["headers"]).get(b"authorization", b""), _keys(state))
    return state


def _core(engine_client: Any) -> Any:
    """The API server's client of the engine core, if Plait's scheduler runs there."""
    scheduler = engine_client.vllm_config.scheduler_config.scheduler_cls
    if scheduler != SCHEDULER:
        raise UnsupportedError(
            f"Plait's scheduler does not run in this engine; start it with --scheduler-cls {SCHEDULER}"
        )
    if engine_client.errored:
        raise EngineError("the engine core has died; restart the engine", code="engine_dead")
    return engine_client.engine_core


def _keys(state: Any) -> list[str]:
    """The engine's API keys, from where vLLM takes them."""
    keys = getattr(getattr(state, "args", None), "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [key for key in ([keys] if isinstance(keys, str) else keys) if key]


def _authenticate(authorization: bytes, keys: list[str]) -> None:
    scheme, _, token = authorization.partition(b" ")
    valid = [hmac.compare_digest(token, key.encode()) for key in keys]
    if keys and not (scheme.lower() == b"bearer" and any(valid)):
        raise AuthenticationError("This engine needs its API key: send 'Authorization: Bearer KEY'.")
