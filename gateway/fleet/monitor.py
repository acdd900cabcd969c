"""Keeps the router informed of its engines: which models they serve, what their caches hold, whether they answer.

Each engine has a task. A probe reads `/v1/models`. While probes succeed, the task long-polls the cache-state report.
Each report also shows that the engine is alive. An engine without reports is probed instead, and its cache is
estimated. A second task reads the models of an engine that reports again from time to time: it may have loaded an
adapter.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import httpx
import msgspec
import structlog

from plait.backends.errors import UnsupportedError
from plait.backends.protocol.cache_state import CacheState
from plait.gateway.config import EngineConfig, UpstreamConfig
from plait.gateway.fleet.health_change import HealthChange
from plait.gateway.fleet.offer import Offer
from plait.gateway.fleet.router import Router
from plait.gateway.fleet.tokenizer_agreement import TokenizerAgreements
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s

AGE_INTERVAL_S = 1.0
TELL_INTERVAL_S = 60.0

MIN_REPORT_INTERVAL_S = 0.02
"""The least time from one request for a report to the next: at most 50 a second. A busy engine has news at every
iteration. After a report that was held back longer, the next is requested at once.
"""

MODELS_INTERVAL_S = 5.0
"""The pause before the models of an engine that reports are read again."""

log = structlog.get_logger(__name__)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _Paths(msgspec.Struct):
    """The part of an OpenAPI document that counts here."""

    paths: dict[str, msgspec.Raw]


class _RefusalError(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """An error in OpenAI's shape, which the plugin's route answers with."""

    error: _RefusalError


class Monitor:
    """Probes and polls `engines` until closed. A context configured for a model overrides the engines' own.

    `agreements` compares the engines' tokenizers with the gateway's.
    """

    def __init__(
        self,
        router: Router,
        engines: Sequence[EngineConfig],
        upstream: UpstreamConfig,
        context_tokens: Mapping[str, int],
        *,
        agreements: TokenizerAgreements,
        supervisor: Supervisor,
        on_change: Callable[[HealthChange | None], None],
    ) -> None:
        self._router = router
        self._upstream = upstream
        self._context_tokens = context_tokens
        self._engines = engines
        self._agreements = agreements
        self._offers: dict[str, Offer] = {}
        self._routes: dict[str, frozenset[str] | None] = {}  # of the engines that have not gone since they said so
        self._supervisor = supervisor
        self._on_change = on_change
        self._told: dict[str, tuple[str, float]] = {}

    def open(self) -> None:
        """Start to probe and poll."""
        for engine in self._engines:
            self.add(engine)
        self._supervisor.start("monitor-age", self._age)

    def add(self, engine: EngineConfig) -> None:
        """Start to probe and poll one engine of the router."""
        self._supervisor.start(f"monitor:{engine.name}", partial(self._watch, engine))
        self._supervisor.start(f"models:{engine.name}", partial(self._read_again, engine))

    def remove(self, engine_id: str) -> None:
        """Stop to probe and poll an engine."""
        self._supervisor.cancel(f"monitor:{engine_id}")
        self._supervisor.cancel(f"models:{engine_id}")
        self._told.pop(engine_id, None)
        self._offers.pop(engine_id, None)
        self._routes.pop(engine_id, None)
        self._agreements.forget(engine_id)

    async def _watch(self, engine: EngineConfig) -> None:
        """Probe and poll one engine until cancelled. Sets it aside when it does not answer."""
        async with _client(engine, self._upstream) as http:
            while True:
                try:
                    await self._follow(engine, http)
                except httpx.TimeoutException:
                    await self._ask_again(engine, http)
                except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError) as error:
                    self._unreachable(engine, error)
                await asyncio.sleep(self._router.engines[engine.name].health.probe_after_s)

    async def _read_again(self, engine: EngineConfig) -> None:
        """Read the models of an engine that reports, until cancelled. Whether it is alive is for `_watch` to say."""
        async with _client(engine, self._upstream) as http:
            while True:
                await asyncio.sleep(MODELS_INTERVAL_S)
                if self._router.engines[engine.name].cache.kind is not None:
                    with suppress(httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError):
                        await self._read_models(engine, http)

    async def _ask_again(self, engine: EngineConfig, http: httpx.AsyncClient) -> None:
        """The engine missed a probe. One that misses a second is silent: a process that is stopped, or a lost host."""
        asked_s = loop_time_s()
        try:
            await self._probe(engine, http)
        except httpx.TimeoutException:
            self._on_change(self._router.health.silent(engine.name, asked_s, loop_time_s()))
            self._tell(engine, "silent")
        except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._unreachable(engine, error)

    def _unreachable(self, engine: EngineConfig, error: Exception) -> None:
        self._routes.pop(engine.name, None)
        self._on_change(self._router.health.unreachable(engine.name))
        self._tell(engine, _reason(error))

    def _tell(self, engine: EngineConfig, reason: str) -> None:
        """Log why a probe failed: at once if the reason is new, then once a minute."""
        now_s, (said, said_s) = loop_time_s(), self._told.get(engine.name, ("", 0.0))
        if reason != said or now_s - said_s > TELL_INTERVAL_S:
            self._told[engine.name] = reason, now_s
            log.info("probe failed", engine=engine.name, url=engine.url, error=reason)

    async def _follow(self, engine: EngineConfig, http: httpx.AsyncClient) -> None:
        """Probe, then poll for as long as the engine answers."""
        while True:
            await self._probe(engine, http)
            requested_s = loop_time_s()
            while await self._poll(engine, http):
                self._answered(engine)
                await asyncio.sleep(max(0.0, requested_s + MIN_REPORT_INTERVAL_S - loop_time_s()))
                requested_s = loop_time_s()
            await asyncio.sleep(self._upstream.probe_interval_s)

    async def _probe(self, engine: EngineConfig, http: httpx.AsyncClient) -> None:
        await self._read_models(engine, http)
        self._answered(engine)

    async def _read_models(self, engine: EngineConfig, http: httpx.AsyncClient) -> None:
        """Ask what the engine serves. Raises what httpx and msgspec raise."""
        response = await _got(http, "/v1/models")
        listed = {model.id: model for model in msgspec.json.decode(response.content, type=_ModelList).data}
        if engine.name not in self._routes:
            self._routes[engine.name] = await _routes(http)
        contexts = {**{name: model.max_model_len for name, model in listed.items()}, **self._context_tokens}
        models = {name: contexts.get(name) for name in engine.models or listed}
        adapters = {name: model.parent for name, model in listed.items() if model.parent and name in models}
        self._offers[engine.name] = Offer(models, adapters, self._routes[engine.name])

    def _answered(self, engine: EngineConfig) -> None:
        offer = self._offers[engine.name]
        change = self._router.health.answered(engine.name, offer.models, offer.adapters, offer.routes)
        if change is not None:
            self._told.pop(engine.name, None)
            log.info("probe answered", engine=engine.name, url=engine.url, models=sorted(offer.models))
        self._on_change(change)

    async def _poll(self, engine: EngineConfig, http: httpx.AsyncClient) -> bool:
        """Fetch and apply one report; False if the engine has none that can be used."""
        known = self._router.engines[engine.name].cache
        told, known_problem = (known.reports, known.problem), known.problem
        requested_s = loop_time_s()
        query: dict[str, str | int] = {"wait_ms": self._upstream.report_wait_ms}
        if known.cursor is not None and known.epoch is not None:
            query |= {"since": known.cursor, "epoch": known.epoch}
        timeout = self._upstream.report_wait_ms / 1e3 + self._upstream.probe_timeout_s
        try:
            headers = {"accept": "application/msgpack"}
            response = await _got(http, "/cache_state", params=query, headers=headers, timeout=timeout)
            report = msgspec.msgpack.decode(response.content, type=CacheState)
            agreement = self._agreements.of(engine.name, self._offers[engine.name], report.tokenizer)
            self._router.report(engine.name, report, requested_s, agreement)
        except httpx.TimeoutException:
            raise
        except (httpx.HTTPError, msgspec.DecodeError, ValueError) as error:
            if isinstance(error, httpx.TransportError):
                await self._probe(engine, http)  # raises if the engine has ended
            self._no_reports(engine, _problem(error), told)
            return False
        agreement.tell(engine.name, known_problem)
        return True

    def _no_reports(self, engine: EngineConfig, problem: str | None, told: tuple[bool | None, str | None]) -> None:
        """The engine has no usable report. This is logged once for each reason, not at every probe."""
        if told == (False, problem):
            pass
        elif problem is None:
            log.warning("engine has no cache-state report: its cache is estimated", engine=engine.name)
        else:
            log.warning("cache-state report refused", engine=engine.name, error=problem)
        self._router.no_reports(engine.name, problem)

    async def _age(self) -> None:
        while True:
            await asyncio.sleep(AGE_INTERVAL_S)
            self._router.age(loop_time_s())


async def _got(http: httpx.AsyncClient, path: str, **options: Any) -> httpx.Response:
    """The answer to a GET. Raises `httpx.HTTPError`, also for a status above 399."""
    try:
        response = await http.get(path, **options)
    except AttributeError as error:  # of anyio, if the engine closes the connection while it is made
        raise httpx.ConnectError("the connection was closed while it was made") from error
    response.raise_for_status()
    return response


async def _routes(http: httpx.AsyncClient) -> frozenset[str] | None:
    """The paths that an engine has; None if it does not say. Raises `httpx.TransportError`."""
    try:
        response = await _got(http, "/openapi.json")
        return frozenset(msgspec.json.decode(response.content, type=_Paths).paths)
    except (httpx.HTTPStatusError, httpx.DecodingError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _client(engine: EngineConfig, upstream: UpstreamConfig) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
    timeout = httpx.Timeout(upstream.connect_timeout_s, read=upstream.probe_timeout_s)
    return httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=timeout, trust_env=False, verify=_trust())


@cache
def _trust() -> ssl.SSLContext:
    """The system's certificates, loaded once: that takes 20 ms, in which no call goes on."""
    return httpx.create_ssl_context(trust_env=False)


def _problem(error: Exception) -> str | None:
    """Why an engine with our plugin has no usable report; None for an engine without the plugin."""
    if not isinstance(error, httpx.HTTPStatusError):
        return _reason(error)
    status = error.response.status_code
    try:
        message = msgspec.json.decode(error.response.content, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = None
    if status in {404, 405} or (status == UnsupportedError.status and message is None):
        return None
    return message or _reason(error)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
