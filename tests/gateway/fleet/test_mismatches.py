"""Engines that are not as the gateway takes them to be."""

from __future__ import annotations

from array import array

import pytest
from structlog.testing import capture_logs

from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.comparisons import context_mismatch, note_answer, note_cached, note_count
from plait.gateway.fleet.engine import FleetEngine, degradation
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


@pytest.fixture
def engine() -> FleetEngine:
    router = Router()
    router.add_engine("a", COSTS)
    return router.engines["a"]


def call(tokens: int, prompt_hash: int | None = 1) -> Call:
    return Call("r", "m", tokens, 64, array("Q"), prompt_hash=prompt_hash)


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


def test_an_engine_that_always_counts_differently_is_told_of_once() -> None:
    router = Router()
    router.add_engine("a", COSTS)
    router.health.answered("a", {"m": None})
    with capture_logs() as logs:
        for tokens, counted, prompt_hash in ((100, 101, 1), (200, 207, 2), (300, 305, None), (300, 300, None)):
            booking = router.book(asked := call(tokens, prompt_hash), router.select(asked, 0.0), 0.0)
            note_answer(router.engines["a"], booking, CallUsage(counted, 5, 0), 1.0)
            assert "200" in str(degradation(router.engines["a"])) or tokens == 100
    assert [entry["event"] for entry in logs] == ["engine differs"]
    booking = router.book(asked := call(50), router.select(asked, 2.0), 2.0)
    note_answer(router.engines["a"], booking, CallUsage(50, 5, 0), 3.0)
    assert degradation(router.engines["a"]) is None


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
