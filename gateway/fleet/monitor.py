"""Keeps the router informed of its engines: which models they serve, what their caches hold, whether they answer.

Each engine has a task. A probe reads `/v1/models`. While probes succeed, the task long-polls the cache-state report.
Each report also shows that the engine is alive. An engine without reports is probed instead, and its cache is
estimated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import httpx
import msgspec
import structlog

from plait.backends.protocol.cache_state import CacheState
from plait.gateway.config import EngineConfig, UpstreamConfig
from plait.gateway.fleet.router import Router
from plait.gateway.timer import loop_time_s

AGE_INTERVAL_S = 1.0

MIN_REPORT_INTERVAL_S = 0.02
"""The pause between two reports of an engine: at most 50 a second. A busy engine has news at every iteration."""

log = structlog.get_logger(__name__)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class Monitor:
    """Probes and polls `engines` until closed. A context configured for a model overrides the engines' own."""

    def __init__(
        self,
        router: Router,
        engines: Sequence[EngineConfig],
        upstream: UpstreamConfig,
        context_tokens: Mapping[str, int],
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._context_tokens = context_tokens
        self._tasks = [asyncio.create_task(self._watch(engine), name=f"monitor-{engine.name}") for engine in engines]
        self._tasks.append(asyncio.create_task(self._age(), name="monitor-age"))
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    async def close(self) -> None:
        """Stop probing and polling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, engine: EngineConfig) -> None:
        """Probe and poll one engine until cancelled. Sets it aside when it does not answer."""
        headers = {"authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
        timeout = httpx.Timeout(self._upstream.connect_timeout_s, read=self._upstream.report_wait_ms / 1e3 + 10)
        async with httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=timeout, trust_env=False) as http:
            while True:
                try:
                    await self._follow(engine, http)
                except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError) as error:
                    if self._router.engine_unreachable(engine.name):
                        log.warning("engine down", engine=engine.name, url=engine.url, error=_reason(error))
                    else:
                        log.info("engine still down", engine=engine.name, url=engine.url, error=_reason(error))
                await asyncio.sleep(self._router.engines[engine.name].health.probe_after_s)

    async def _follow(self, engine: EngineConfig, http: httpx.AsyncClient) -> None:
        """Probe, then poll for as long as the engine answers."""
        while True:
            models = await self._probe(engine, http)
            while await self._poll(engine, http):
                self._answered(engine, models)
                await asyncio.sleep(MIN_REPORT_INTERVAL_S)
            await asyncio.sleep(self._upstream.probe_interval_s)

    async def _probe(self, engine: EngineConfig, http: httpx.AsyncClient) -> dict[str, int | None]:
        response = await http.get("/v1/models")
        response.raise_for_status()
        listed = {
            model.id: model.max_model_len for model in msgspec.json.decode(response.content, type=_ModelList).data
        }
        names = engine.models or listed
        models = {name: self._context_tokens.get(name, listed.get(name)) for name in names}
        self._answered(engine, models)
        return models

    def _answered(self, engine: EngineConfig, models: Mapping[str, int | None]) -> None:
        if self._router.engine_answered(engine.name, models):
            log.info("engine up", engine=engine.name, url=engine.url, models=sorted(models))

    async def _poll(self, engine: EngineConfig, http: httpx.AsyncClient) -> bool:
        """Fetch and apply one report; False if the engine has no usable one."""
        known = self._router.engines[engine.name]
        is_news = known.reports is not False  # log a problem with reports once, not at every probe
        requested_s = loop_time_s()
        query: dict[str, str | int] = {"wait_ms": self._upstream.report_wait_ms}
        if known.cursor is not None and known.epoch is not None:
            query |= {"since": known.cursor, "epoch": known.epoch}
        response = await http.get("/cache_state", params=query, headers={"accept": "application/msgpack"})
        if response.status_code in {404, 405, 501}:
            if is_news:
                log.warning("engine has no cache-state report: its cache is estimated", engine=engine.name)
            self._router.no_reports(engine.name)
            return False
        response.raise_for_status()
        try:
            self._router.report(engine.name, msgspec.msgpack.decode(response.content, type=CacheState), requested_s)
        except ValueError as error:
            if is_news:
                log.warning("cache-state report refused", engine=engine.name, error=str(error))
            self._router.no_reports(engine.name)
            return False
        return True

    async def _age(self) -> None:
        while True:
            await asyncio.sleep(AGE_INTERVAL_S)
            self._router.age(loop_time_s())


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log a monitor task that ended by itself: that is a defect in Plait."""
    if not task.cancelled() and task.exception() is not None:
        log.error("monitor failed", task=task.get_name(), exc_info=task.exception())


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
