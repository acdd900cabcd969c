"""`GET /cache_state` in vLLM's API server, as ASGI middleware for `--middleware`.

If the engine has an API key, the report needs it.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from plait.backends.adapter.cache_state_route import ANSWER_DEADLINE_S, PATH, Receive, ReportQuery, Scope, Send, answer
from plait.backends.errors import AuthenticationError, EngineError, EngineTimeoutError, UnsupportedError
from plait.backends.vllm.launch import SCHEDULER
from plait.backends.vllm.plugin import METHOD


class CacheStateMiddleware:
    """Answers `/cache_state` and passes every other request on."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) != PATH:
            await self._app(scope, receive, send)
        else:
            await answer(scope, send, _report)


async def _report(scope: Scope, query: ReportQuery) -> bytes:
    """The engine core's report. If nothing changes during the wait, ask again without waiting."""
    state = scope["app"].state
    _authenticate(dict(scope["headers"]).get(b"authorization", b""), _keys(state))
    core = _core(state.engine_client)
    report: bytes
    if query.wait_s > 0 and query.since is not None:
        try:
            async with asyncio.timeout(query.wait_s):
                report = await core.call_utility_async(METHOD, query.since, query.epoch, True)
                return report
        except TimeoutError:
            pass
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            report = await core.call_utility_async(METHOD, query.since, query.epoch, False)
    except TimeoutError as error:
        raise EngineTimeoutError(f"the engine core did not answer within {ANSWER_DEADLINE_S:g} s") from error
    return report


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
