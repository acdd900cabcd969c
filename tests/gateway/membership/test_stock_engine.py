"""Engines without the adapter: recognised by what they answer, and read as their kind tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest
from structlog.testing import capture_logs

import plait.gateway.membership.stock_engine
from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.engine_counts import NO_SIZES, EngineSizes
from plait.gateway.config.sections import EngineConfig
from plait.gateway.fleet.router import Router
from plait.gateway.membership.stock_engine import IDLE_INTERVAL_S, INTERVAL_S, SIZES_INTERVAL_S, WITHOUT_S, StockEngine
from tests.gateway.membership.fake_http import requests_to
from tests.gateway.membership.stock_answers import PS, SGLANG, STOCK, TRTLLM, Answers, Stock, models
from tests.gateway.membership.watched_engine import COSTS, FakeEngine, report, until, watching

RECOGNISED_S = 5.0
MOST_PROBES = 6
"""Requests until an engine is recognised: small ones, once."""


class Watched:
    """An engine e that has answered its first probe and does not report, and the seconds since then."""

    def __init__(self, answers: Mapping[str, bytes], kv_tokens: int | None = None) -> None:
        self.answers = dict(answers)
        self.error: Exception | None = None
        self.hangs: set[str] = set()
        self.asked: list[str] = []
        self.now_s = 0.0
        self.router = Router()
        self.config = EngineConfig(url="http://e", name="e", kv_tokens=kv_tokens)
        self.router.add_engine("e", COSTS, kv_tokens=kv_tokens)
        self.engine = self.router.engines["e"]
        self.router.health.answered("e", {"m": None})
        self.router.no_reports("e")

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if self.error is not None:
            raise self.error
        if request.url.path in self.hangs:
            raise httpx.ReadTimeout("nothing came")
        body = self.answers.get(request.url.path)
        return httpx.Response(404 if body is None else 200, content=body or b"")

    async def run(self, reader: StockEngine, until_s: float) -> None:
        while self.now_s < until_s:
            self.now_s += await reader.look()


@asynccontextmanager
async def watched(
    monkeypatch: pytest.MonkeyPatch, answers: Answers, kv_tokens: int | None = None
) -> AsyncIterator[tuple[Watched, Callable[[float], Awaitable[None]]]]:
    engine = Watched(answers, kv_tokens)
    monkeypatch.setattr(plait.gateway.membership.stock_engine, "loop_time_s", lambda: engine.now_s)
    with requests_to(engine.answer) as requests:
        reader = StockEngine(engine.router, engine.config, requests, 4.0)

        async def run(until_s: float) -> None:
            await engine.run(reader, until_s)

        yield engine, run


@pytest.mark.parametrize("name", STOCK)
async def test_an_engine_is_recognised_and_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stock: Stock = STOCK[name]
    with capture_logs() as logs:
        async with watched(monkeypatch, stock.answers) as (seen, run):
            await run(RECOGNISED_S)
    engine = seen.engine
    assert (engine.kind, engine.counts) == (stock.kind, stock.counts)
    assert engine.stock is not None
    assert engine.stock.sizes == stock.sizes
    assert (engine.view.slots, engine.cache.estimated_tokens) == (stock.slots, stock.kv_tokens)
    assert engine.cache.kind is None, "it gets no ids"
    title = DIALECTS[stock.kind].title
    assert [(one["event"], one["kind"]) for one in logs] == [("engine recognised", title)], "once"


@pytest.mark.parametrize("more", [{}, {"/prometheus/metrics": TRTLLM}])
async def test_the_queue_of_tensorrt_llm_is_never_read(monkeypatch: pytest.MonkeyPatch, more: Answers) -> None:
    """Neither if its models have another owner, behind a proxy."""
    for owner in ("tensorrt_llm", "us"):
        answers = {"/v1/models": models(owner), "/metrics": b"[]", **more}
        async with watched(monkeypatch, answers) as (seen, run):
            routes = {"/v1/models", "/metrics", "/kv_cache_events"}
            seen.router.health.answered("e", {"m": None}, routes=routes)
            await run(2 * WITHOUT_S)
            assert (seen.engine.kind, seen.asked.count("/metrics")) == ("trtllm", 0)


async def test_metrics_alone_tell_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, {"/v1/models": models("us"), "/metrics": SGLANG}) as (seen, run):
        await run(1.0)
        assert seen.engine.kind == "sglang"
        before_metrics = seen.asked[: seen.asked.index("/metrics")]
        assert len(before_metrics) < MOST_PROBES


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/v1/models": b"<html>", "/props": b"[]", "/info": b'"x"', "/api/ps": b"null", "/metrics": b"up 1\n"},
        {"/v1/models": b'{"data":[{"id":"m"}]}', "/info": b'{"model_id":"m","max_concurrent_requests":512}'},
        {"/props": b'{"default_generation_settings":{}}', "/metrics": b"\xff"},
    ],
    ids=["nothing", "nonsense", "the server for embeddings of TGI's makers", "half of it"],
)
async def test_any_other_engine_is_asked_little(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> None:
    async with watched(monkeypatch, answers) as (seen, run):
        await run(WITHOUT_S - 1)
        assert seen.engine.kind is None
        assert seen.engine.counts is None
        assert Counter(seen.asked) == Counter(set(seen.asked)), "each path once"
        assert len(seen.asked) <= MOST_PROBES
        await run(WITHOUT_S + 2)
        assert set(Counter(seen.asked).values()) == {2}, "it may have become another"


async def test_an_engine_that_cannot_be_read_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, STOCK["llama.cpp"].answers) as (seen, run):
        seen.error = httpx.ReadTimeout("nothing came")
        await run(10.0)
        assert seen.engine.takes_calls
        seen.error = None
        await run(11.0)
        assert seen.engine.kind == "llamacpp"
        seen.error = httpx.ConnectError("refused")
        await run(20.0)
        assert (seen.engine.takes_calls, seen.engine.counts, seen.engine.kind) == (True, None, "llamacpp")
        assert seen.engine.view.slots == 4, "as it has said"


async def test_a_route_of_another_kind_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a proxy that hides whose the models are, and drops what it does not know."""
    answers = {**STOCK["vllm"].answers, "/v1/models": models("proxy")}
    async with watched(monkeypatch, answers) as (seen, run):
        seen.hangs.update(("/props", "/api/ps"))
        await run(RECOGNISED_S)
        assert seen.engine.kind == "vllm"
        assert seen.asked.count("/props") == 1


async def test_a_nested_answer_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = b"[" * 100_000
    async with watched(monkeypatch, dict.fromkeys(("/v1/models", "/props", "/info", "/api/ps"), nested)) as (seen, run):
        await run(RECOGNISED_S)
        assert (seen.engine.kind, seen.engine.takes_calls) == (None, True)


async def test_slots_of_the_former_process_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {path: body for path, body in STOCK["llama.cpp"].answers.items() if path in ("/v1/models", "/props")}
    async with watched(monkeypatch, answers) as (seen, run):
        await run(2.0)
        assert seen.engine.view.slots == 4
        seen.router.health.unreachable("e")
        await run(4.0)
        assert seen.engine.view.slots == 0


async def test_what_is_read_while_an_adapter_reports_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, STOCK["llama.cpp"].answers) as (seen, _run):
        seen.router.report("e", report(1), 1.0)
        seen.router.recognised("e", "llamacpp", EngineSizes(slots=4))
        assert (seen.engine.kind, seen.engine.stock) == ("embedded", None)


async def test_a_model_that_was_unloaded_keeps_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, {"/v1/models": models("library"), "/api/ps": b'{"models":[]}'}) as (seen, run):
        await run(1.0)
        assert seen.engine.stock is not None
        assert seen.engine.stock.sizes.context("m") is None
        seen.answers["/api/ps"] = PS
        await run(SIZES_INTERVAL_S + 2)
        seen.answers["/api/ps"] = b'{"models":[{"name":"n","context_length":4096}]}'
        await run(2 * SIZES_INTERVAL_S + 3)
        assert seen.engine.stock.sizes.contexts == {"m": 16_384, "n": 4_096}


@pytest.mark.parametrize("name", ["vllm", "TGI"])
async def test_the_operators_word_on_the_kv_cache_comes_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with watched(monkeypatch, STOCK[name].answers, kv_tokens=640) as (seen, run):
        await run(RECOGNISED_S)
        assert seen.engine.kind == STOCK[name].kind
        assert seen.engine.cache.estimated_tokens == 640


async def test_an_engine_that_comes_back_may_be_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, STOCK["llama.cpp"].answers) as (seen, run):
        await run(2.0)
        seen.router.health.unreachable("e")
        await run(4.0)
        assert (seen.engine.kind, seen.engine.counts) == (None, None)
        seen.answers = dict(STOCK["TGI"].answers)
        seen.router.health.answered("e", {"m": None})
        await run(6.0)
        assert seen.engine.kind == "tgi"
        seen.router.report("e", report(1), 6.0)
        await run(8.0)
        assert (seen.engine.kind, seen.engine.stock) == ("embedded", None), "it has the adapter now"


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        (EngineSizes(context_tokens=8_192), {}, 8_192),
        (EngineSizes(contexts={"m": 2_048}), {"m": 4_096}, 2_048),
        (EngineSizes(contexts={"m:latest": 2_048}), {}, 2_048),
        (EngineSizes(context_tokens=8_192), {"m": 1_024}, 1_024),
        (NO_SIZES, {"m": 1_024}, 1_024),
        (NO_SIZES, {}, None),
    ],
)
async def test_a_context_that_the_engine_says_is_the_models(
    monkeypatch: pytest.MonkeyPatch, sizes: EngineSizes, limit: dict[str, int], expected: int | None
) -> None:
    fake = FakeEngine()
    fake.models = {"data": [{"id": "m"}]}
    fake.reports = [httpx.Response(404)] * 1_000
    async with watching(monkeypatch, fake, contexts=limit) as router:
        await until(lambda: len(fake.polls) > 1)
        router.recognised("a", "llamacpp", sizes)
        await until(lambda: router.models.contexts.get("m", 0) == expected)
        polls = len(fake.polls)
        await until(lambda: len(fake.polls) > polls + 2)
        assert router.models.contexts["m"] == expected


async def test_an_engine_without_calls_is_read_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    async with watched(monkeypatch, {"/v1/models": models("vllm"), "/metrics": idle}) as (seen, run):
        await run(30.0)
        assert seen.asked.count("/metrics") <= 30 / IDLE_INTERVAL_S + 2
        seen.asked.clear()
        seen.answers["/metrics"] = b"vllm:num_requests_running 1\n"  # another client's call
        await run(30.0 + IDLE_INTERVAL_S + 6)
        assert seen.asked.count("/metrics") >= 6 / INTERVAL_S - 1
        seen.answers["/metrics"] = idle
        await run(50.0)
        seen.asked.clear()
        seen.engine.view.outstanding = 1
        await run(56.0)
        assert seen.asked.count("/metrics") >= 5 / INTERVAL_S - 1, "a call of the gateway's own"
