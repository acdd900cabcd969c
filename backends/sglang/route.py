"""Plait's routes in SGLang's API server: `GET /cache_state`, `POST /call_objectives` and `GET /plait/tokenizer`.

All need the server's API key, as SGLang's own routes do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from plait.backends.adapter.engine_tokenizer import EngineTokenizer, read_tokenizer
from plait.backends.adapter.required_names import load
from plait.backends.adapter.routes import (
    ANSWER_DEADLINE_S,
    CACHE_STATE,
    Receive,
    ReportQuery,
    Scope,
    Send,
    answer_cache_state,
    answer_call_objectives,
    answer_tokenizer,
)
from plait.backends.errors import EngineTimeoutError, UnsupportedError
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.call_objectives import PATH as CALL_OBJECTIVES
from plait.backends.protocol.tokenizer_files import PATH as TOKENIZER
from plait.backends.sglang.channel import (
    STATE_KEY,
    ChangeObjectives,
    NewsReceiver,
    ReportSince,
    SchedulerQuery,
    query_id,
)

QUIET_S = 0.2
"""After this time without news, a waiting request sends a query: news may be lost, and an idle scheduler is late."""

EXIT_S = 0.5
"""How long a stopping server waits for an answer. A scheduler that has exited answers nothing, and the server stops
only after its requests have ended.
"""


class SchedulerAccess:
    """Sends queries to the scheduler. `problem` is why the plugin is not active, if the API server knows the reason."""

    def __init__(self, problem: str | None = None) -> None:
        self._problem = problem

    async def ask(self, query: SchedulerQuery) -> Any:
        """The scheduler's answer.

        Raises UnsupportedError if it answers without the plugin, EngineTimeoutError if it does not answer.
        """
        manager = load("sglang.srt.entrypoints.http_server.get_global_state")().tokenizer_manager
        manager.auto_create_handle_loop()
        request = load("sglang.srt.managers.io_struct.GetInternalStateReq")(rid=query_id(query))
        # Never cancelled, because SGLang would take the late answer as the answer to the next request.
        asked = asyncio.ensure_future(manager.get_internal_state_communicator(request))
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + ANSWER_DEADLINE_S
        while not (await asyncio.wait((asked,), timeout=EXIT_S))[0]:
            if getattr(manager, "gracefully_exit", False):
                raise EngineTimeoutError("the server is stopping, and its scheduler does not answer")
            if now_s() >= ends_s:
                raise EngineTimeoutError(f"the scheduler did not answer within {ANSWER_DEADLINE_S:g} s")
        first = asked.result()[0]
        answer: Any = first.internal_state.get(STATE_KEY)
        if answer is None:
            reason = self._problem or "see its log for why it was not loaded"
            raise UnsupportedError(f"Plait's plugin is not active in this engine's scheduler: {reason}")
        return answer


class CacheStateRoute:
    def __init__(self, scheduler: SchedulerAccess, news: NewsReceiver, tokenizer: bytes) -> None:
        self._scheduler = scheduler
        self._news = news
        self._tokenizer = tokenizer

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await answer_cache_state(scope, send, self._report, self._tokenizer)

    async def _report(self, _scope: Scope, query: ReportQuery) -> bytes:
        """The scheduler's report, after the next change or at the end of the wait. Pushed, or else asked for."""
        if query.since is None or query.wait_s <= 0:
            return await self._asked(query)
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + query.wait_s
        asks = not self._news.follows(query.since, query.epoch)
        while True:
            news = self._news.next()  # before the check below, so that no message in between is missed
            told = self._news.report_after(query.since, query.epoch, query.gateway)
            if told is not None:
                return told
            if asks:
                report = await self._asked(query)
                if now_s() >= ends_s or _has_changes(report, query.since):
                    return report
            came = await _is_set(news, min(QUIET_S, ends_s - now_s()))
            asks = not came or not self._news.follows(query.since, query.epoch)

    async def _asked(self, query: ReportQuery) -> bytes:
        return bytes(await self._scheduler.ask(ReportSince(query.since, query.epoch, query.gateway)))


class CallObjectivesRoute:
    def __init__(self, scheduler: SchedulerAccess) -> None:
        self._scheduler = scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_call_objectives(scope, receive, send, lambda _scope: self._change)

    async def _change(self, body: bytes) -> int:
        return int(await self._scheduler.ask(ChangeObjectives(body.decode())))


class TokenizerRoute:
    def __init__(self, find: Callable[[], EngineTokenizer | None], fingerprint: bytes) -> None:
        self._find = find
        self._fingerprint = fingerprint

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await answer_tokenizer(scope, send, lambda _scope: self._find(), self._fingerprint)


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            return await event.wait()
    return False


def _has_changes(report: bytes, cursor: int) -> bool:
    state = msgspec.msgpack.decode(report, type=CacheState)
    return state.snapshot or state.cursor != cursor


def add_routes(problem: str | None, news: NewsReceiver, find: Callable[[], EngineTokenizer | None]) -> None:
    """Add the routes to SGLang's API server. `find` returns its tokenizer, which is read now."""
    router, scheduler = load("sglang.srt.entrypoints.http_server.app").router, SchedulerAccess(problem)
    tokenizer = read_tokenizer(find, str(load("sglang.__version__") or ""))
    router.add_route(CACHE_STATE, CacheStateRoute(scheduler, news, tokenizer), methods=None)
    router.add_route(CALL_OBJECTIVES, CallObjectivesRoute(scheduler), methods=None)
    router.add_route(TOKENIZER, TokenizerRoute(find, tokenizer), methods=None)
