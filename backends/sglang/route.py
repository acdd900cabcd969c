"""Plait's routes in SGLang's API server: `GET /cache_state`, `POST /call_objectives` and `GET /plait/tokenizer`.

All need the server's API key, as SGLang's own routes do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from plait.backends.adapter.engine_tokenizer import EngineTokenizer, read_tokenizer
from plait.backends.adapter.named_ranks import NamedRanks, named_rank
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
from plait.backends.sglang.channel import STATE_KEY, ChangeObjectives, NewsReceiver, ReportSince, SchedulerQuery, id_of

QUIET_S = 0.2
"""After this time without news, a waiting request sends a query: news may be lost, and an idle scheduler is late."""

EXIT_S = 0.5
"""How long a stopping server waits for an answer. A scheduler that has exited answers nothing, and the server stops
only after its requests have ended.
"""


class SchedulerAccess:
    """Sends queries to the schedulers. `problem` is why the plugin is not active, if the API server knows why."""

    def __init__(self, problem: str | None = None) -> None:
        self._problem = problem
        self._waiting: dict[asyncio.Future[Any], SchedulerQuery] = {}
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, query: SchedulerQuery) -> Any:
        """The answer of the query's rank.

        Raises UnsupportedError if a scheduler answers without the plugin, EngineTimeoutError if one does not answer.
        """
        manager = load("sglang.srt.entrypoints.http_server.get_global_state")().tokenizer_manager
        manager.auto_create_handle_loop()
        loop = asyncio.get_running_loop()
        asked, ends_s = loop.create_future(), loop.time() + ANSWER_DEADLINE_S
        self._waiting[asked] = query
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(manager))
        try:
            while not (await asyncio.wait((asked,), timeout=EXIT_S))[0]:
                if getattr(manager, "gracefully_exit", False):
                    raise EngineTimeoutError("the server is stopping, and its scheduler does not answer")
                if loop.time() >= ends_s:
                    raise EngineTimeoutError(f"the scheduler did not answer within {ANSWER_DEADLINE_S:g} s")
        finally:
            self._waiting.pop(asked, None)
            asked.cancel()
        answer = asked.result()
        if answer is None:
            reason = self._problem or "see its log for why it was not loaded"
            raise UnsupportedError(f"Plait's plugin is not active in this engine's scheduler: {reason}")
        return answer

    async def _send(self, manager: Any) -> None:
        """Send the queries that wait, then those that have come meanwhile. Each round takes a step of all ranks.

        Never cancelled, because SGLang would take a late answer as the answer to its next request.
        """
        while self._waiting:
            queries, self._waiting = self._waiting, {}
            request = load("sglang.srt.managers.io_struct.GetInternalStateReq")(rid=id_of([*queries.values()]))
            schedulers = await manager.get_internal_state_communicator(request)
            ranks = [scheduler.internal_state.get(STATE_KEY) for scheduler in schedulers]
            for place, asked in enumerate(queries):
                if not asked.done():  # not given up
                    found = () if None in ranks else (rank[place] for rank in ranks)
                    asked.set_result(next((answer for answer in found if answer is not None), None))


class CacheStateRoute:
    def __init__(self, scheduler: SchedulerAccess, news: NewsReceiver, tokenizer: bytes, ranks: int) -> None:
        self._scheduler = scheduler
        self._news = news
        self._tokenizer = tokenizer
        self._ranks = ranks

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await answer_cache_state(scope, send, self._report, self._tokenizer, self._ranks)

    async def _report(self, _scope: Scope, query: ReportQuery) -> bytes:
        """The rank's report, after the next change or at the end of the wait. Pushed, or else asked for.

        News counts while the question waits, too: there are no answers while another rank is silent.
        """
        if query.since is None or query.wait_s <= 0:
            return await self._asked(query)
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + query.wait_s
        place = query.rank, query.since, query.epoch
        asks, asked = not self._news.follows(*place), None
        try:
            while True:
                news = self._news.next(query.rank)  # before the check below, so that no message in between is missed
                told = self._news.report_after(*place, query.gateway)
                if told is not None:
                    return told
                if asks and asked is None:
                    asked = asyncio.create_task(self._asked(query))
                if asked is None:
                    came, _ = await asyncio.wait((news,), timeout=max(0.0, min(QUIET_S, ends_s - now_s())))
                    asks = not came or not self._news.follows(*place)
                elif asked in (await asyncio.wait((news, asked), return_when=asyncio.FIRST_COMPLETED))[0]:
                    report, asks, asked = asked.result(), False, None
                    if now_s() >= ends_s or _has_changes(report, query.since):
                        return report
        finally:
            if asked is not None:
                asked.cancel()

    async def _asked(self, query: ReportQuery) -> bytes:
        return bytes(await self._scheduler.ask(ReportSince(query.since, query.epoch, query.gateway, query.rank)))


class CallObjectivesRoute:
    def __init__(self, scheduler: SchedulerAccess) -> None:
        self._scheduler = scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_call_objectives(scope, receive, send, lambda _scope: self._change)

    async def _change(self, body: bytes) -> int:
        return int(await self._scheduler.ask(ChangeObjectives(body.decode(), named_rank() or 0)))


class TokenizerRoute:
    def __init__(self, find: Callable[[], EngineTokenizer | None], fingerprint: bytes) -> None:
        self._find = find
        self._fingerprint = fingerprint

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await answer_tokenizer(scope, send, lambda _scope: self._find(), self._fingerprint)


def _has_changes(report: bytes, cursor: int) -> bool:
    state = msgspec.msgpack.decode(report, type=CacheState)
    return state.snapshot or state.cursor != cursor


def add_routes(problem: str | None, news: NewsReceiver, find: Callable[[], EngineTokenizer | None], ranks: int) -> None:
    """Add the routes to SGLang's API server. `find` returns its tokenizer, which is read now."""
    app, scheduler = load("sglang.srt.entrypoints.http_server.app"), SchedulerAccess(problem)
    tokenizer = read_tokenizer(find, str(load("sglang.__version__") or ""))
    app.router.add_route(CACHE_STATE, CacheStateRoute(scheduler, news, tokenizer, ranks), methods=None)
    app.router.add_route(CALL_OBJECTIVES, CallObjectivesRoute(scheduler), methods=None)
    app.router.add_route(TOKENIZER, TokenizerRoute(find, tokenizer), methods=None)


def obey_named_ranks(tokenizer_manager: Any, ranks: int) -> None:
    """Send what SGLang computes to the rank that its request names. Some of SGLang's routes do so themselves."""
    load("sglang.srt.entrypoints.http_server.app").add_middleware(NamedRanks, count=lambda: ranks)
    create = tokenizer_manager._create_tokenized_object  # noqa: SLF001 - for each prompt, before it is sent

    def created(*args: Any, **kwargs: Any) -> Any:
        tokenized = create(*args, **kwargs)
        if tokenized.routed_dp_rank is None:
            tokenized.routed_dp_rank = named_rank()
        return tokenized

    tokenizer_manager._create_tokenized_object = created  # noqa: SLF001
