"""Engines that offer less than others: calls go where they are taken, and no client sees a refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from e2e.faults.reports import report
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from e2e.stub_engine import JSON, Script, StubEngine, listed

CALLS = 100
AT_ONCE = 8
SHORT_TOKENS, LONG_TOKENS = 2_000, 32_768
TOO_LONG = (
    b"This model's maximum context length is 2000 tokens. However, your prompt contains at least 2001 input tokens."
)
MODELS = ("demo", "adapter")
NO_MODEL = (
    b'{"error":{"message":"The model `adapter` does not exist.","type":"NotFoundError","param":"model","code":404}}'
)
WHOLE = b'{"choices":[{"index":0,"text":"Hi","finish_reason":"stop"}]}'
REFUSAL = b'{"error":{"message":"%b","type":"BadRequestError","param":"input_tokens","code":400}}'


def started(*servers: Server) -> None:
    for server in servers:
        server.start()
    for server in servers:
        server.wait_until_ready()


def long_prompt(number: int) -> str:
    """From some 1,500 tokens to 6,000 by any count: around the short context, and beyond."""
    return f"call {number}: " + "one two three " * (450 + 12 * number)


def asked(gateway: Server, number: int) -> httpx.Response:
    body: dict[str, Any] = {"model": "demo", "prompt": long_prompt(number), "max_tokens": 2}
    return gateway.post("/v1/completions", json=body)


def statuses(ask: Callable[[int], httpx.Response], calls: int = CALLS) -> dict[int, int]:
    """How often a call got each status."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(Counter(answer.status_code for answer in pool.map(ask, range(calls))))


def engine(launch: Launcher, name: str, context_tokens: int) -> Server:
    return launch.engine(name, options=["--max-context-tokens", str(context_tokens)])


@pytest.mark.parametrize("tokenizer", ["embedded", "estimated"])
def test_no_long_prompt_is_refused_for_a_short_context(launch: Launcher, tokenizer: str) -> None:
    short, long = engine(launch, "short", SHORT_TOKENS), engine(launch, "long", LONG_TOKENS)
    models = [{"name": "demo", "tokenizer": tokenizer}]
    gateway = launch.gateway([short, long], models=models, placement={"policy": "round_robin"})
    started(short, long, gateway)
    assert statuses(partial(asked, gateway)) == {200: CALLS}
    assert gateway.metric("plait_calls_total", outcome="ok", engine="short") > 0, "it takes what it has room for"


def test_no_long_prompt_is_refused_by_an_engine_that_does_not_say_its_context(launch: Launcher) -> None:
    with StubEngine() as short:
        short.script = Script([REFUSAL % TOO_LONG], 400, JSON)
        long = engine(launch, "long", LONG_TOKENS)
        entries = [{"name": "short", "url": short.url}, {"name": "long", "url": long.url}]
        gateway = launch.gateway(entries, placement={"policy": "round_robin"})
        started(long, gateway)
        assert statuses(partial(asked, gateway)) == {200: CALLS}
        assert gateway.metric("plait_retries_total", cause="context_length", engine="short") == len(short.received) > 0
        assert gateway.metric("plait_call_failures_total") == 0


@pytest.mark.parametrize("reports", [False, True])
def test_an_adapter_may_be_unloaded_under_load(launch: Launcher, reports: bool) -> None:
    calls = 2 * CALLS
    with StubEngine() as loses, StubEngine() as keeps:
        for epoch, stub in {"1": loses, "2": keeps}.items():
            stub.models, stub.script = listed(*MODELS), Script([WHOLE], 200, JSON)
            stub.report = report([None, [11]], epoch=epoch) if reports else None
        entries = [{"name": "loses", "url": loses.url}, {"name": "keeps", "url": keeps.url}]
        gateway = launch.gateway(
            entries,
            models=[{"name": model, "tokenizer": "estimated"} for model in MODELS],
            placement={"policy": "round_robin"},
            upstream={"probe_interval_s": 5.0},
        )
        started(gateway)
        eventually(lambda: gateway.metric("plait_engine_up") == 2)
        eventually(lambda: gateway.metric("plait_engine_reports") == 2 * reports)

        def ask(number: int) -> httpx.Response:
            if number == CALLS:
                loses.script, loses.models = Script([NO_MODEL], 404, JSON), listed("demo")
            return gateway.post("/v1/completions", json={"model": "adapter", "prompt": "Hello", "max_tokens": 1})

        assert statuses(ask, calls) == {200: calls}
        moved = gateway.metric("plait_retries_total", cause="model_not_found", engine="loses")
        assert moved <= AT_ONCE, "those that were on their way"
        assert gateway.metric("plait_call_failures_total") == 0
        assert gateway.metric("plait_engine_up") == 2
