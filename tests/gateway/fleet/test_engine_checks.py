"""Engines that are not as the gateway takes them to be."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from structlog.testing import capture_logs

from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.engine import FleetEngine, degradation
from plait.gateway.fleet.engine_checks import context_mismatch, note_cached, note_count, tokenizer_mismatch
from plait.gateway.fleet.router import Router
from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call

OWN = load_tokenizer("embedded")
COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


@pytest.fixture
def engine() -> FleetEngine:
    router = Router()
    router.add_engine("a", COSTS)
    return router.engines["a"]


def call(tokens: int, prompt_hash: int | None = 1) -> Call:
    return Call("r", "m", tokens, 64, array("Q"), prompt_hash=prompt_hash)


@asynccontextmanager
async def tokenizing(tokenizer: Tokenizer | None, status: int = 200) -> AsyncIterator[httpx.AsyncClient]:
    """An engine that has `/tokenize`."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        assert (request.url.path, asked["model"]) == ("/tokenize", "m")
        if tokenizer is None or ("messages" in asked and status != 200):
            return httpx.Response(status, text="nothing")
        ids = tokenizer.encode(asked["prompt"]) if "prompt" in asked else tokenizer.encode_chat(asked["messages"])
        return httpx.Response(200, json={"tokens": ids, "count": len(ids)})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://e") as http:
        yield http


async def test_the_same_ids_are_no_mismatch() -> None:
    async with tokenizing(OWN) as http:
        assert await tokenizer_mismatch(http, "m", OWN) is None


async def test_other_ids_are_named_with_both_values() -> None:
    async with tokenizing(load_tokenizer("bytes")) as http:
        problem = await tokenizer_mismatch(http, "m", OWN)
    assert problem is not None
    assert "tokens of a text" in problem
    assert "from token 0 on" in problem


async def test_another_template_is_found_by_a_chat(tmp_path_factory: pytest.TempPathFactory) -> None:
    template = tmp_path_factory.mktemp("t") / "other.jinja"
    template.write_text("{{ messages[0].content }}")
    async with tokenizing(load_tokenizer("embedded", chat_template=str(template))) as http:
        problem = await tokenizer_mismatch(http, "m", OWN)
    assert problem is not None
    assert "tokens of a chat" in problem


@pytest.mark.parametrize("status", [200, 400, 404, 501])
async def test_an_engine_that_does_not_say_is_no_mismatch(status: int) -> None:
    async with tokenizing(None, status) as http:
        assert await tokenizer_mismatch(http, "m", OWN) is None


async def test_an_engine_may_tokenize_texts_only() -> None:
    async with tokenizing(OWN, 400) as http:
        assert await tokenizer_mismatch(http, "m", OWN) is None


def test_the_first_answer_tells_of_another_count(engine: FleetEngine) -> None:
    with capture_logs() as logs:
        note_count(engine, call(100), CallUsage(101, 5, 0))
        note_count(engine, call(200), CallUsage(207, 5, 0))
    assert [entry["event"] for entry in logs] == ["engine differs"]
    problem = degradation(engine)
    assert problem is not None
    assert "207 tokens" in problem
    assert "200" in problem
    note_count(engine, call(50), CallUsage(50, 5, 0))
    assert degradation(engine) is None


def test_a_prompt_that_the_gateway_does_not_count_says_nothing(engine: FleetEngine) -> None:
    note_count(engine, call(100, None), CallUsage(101, 5, 0))
    assert degradation(engine) is None


def test_a_context_must_not_be_longer_than_the_engines() -> None:
    assert context_mismatch({"m": 4_096, "n": None}, {"m": 4_096, "n": 9_000, "o": 1}) is None
    problem = context_mismatch({"m": 4_096}, {"m": 8_192})
    assert problem is not None
    assert "4096" in problem
    assert "8192" in problem


def test_answers_that_contradict_the_reports_name_the_engine(engine: FleetEngine) -> None:
    for at in range(3):
        assert degradation(engine) is None
        note_cached(engine, 0, 1_024, booked_s=at, now_s=at + 0.5)
    problem = degradation(engine)
    assert problem is not None
    assert "finds 1024 tokens" in problem
    assert "say 0" in problem
    note_cached(engine, 512, 1_024, booked_s=4.0, now_s=5.0)
    assert degradation(engine) is None


def test_calls_at_once_contradict_the_reports_once(engine: FleetEngine) -> None:
    """The first of a burst computes the prefix for which the others wait, or not."""
    for at in range(20):
        note_cached(engine, 2_000, 0, booked_s=0.0, now_s=1.0 + at)
    assert degradation(engine) is None


def test_short_prompts_contradict_nothing(engine: FleetEngine) -> None:
    for at in range(5):
        note_cached(engine, 240, 0, booked_s=at, now_s=at + 0.5)
    assert degradation(engine) is None
