"""Draining engines: when one hands over, when it gets no more calls, and how that is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from plait.gateway.fleet.router import Router
from plait.gateway.membership import engine_set
from plait.gateway.membership.engine_set import Drains
from plait.gateway.supervision import Supervisor
from tests.gateway.fleet.lettered_prompts import new_router
from tests.waiting import WITHIN_S


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(CollectorRegistry())
    yield supervisor
    await supervisor.close()


def draining(router: Router) -> list[str]:
    """The engines that get no calls."""
    return [engine_id for engine_id, engine in router.engines.items() if engine.draining]


async def until_drained(router: Router) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not draining(router):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("idle_s", "hand_over_s"), [(0.0, 60.0), (60.0, 0.05)])
async def test_a_hand_over_ends_with_its_calls_or_its_time(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, idle_s: float, hand_over_s: float
) -> None:
    monkeypatch.setattr(engine_set, "IDLE_S", idle_s)
    router = new_router("a", "b")
    drains = Drains(router, supervisor, hand_over_s)
    drains.begin("a")
    drains.begin("a")
    assert (draining(router), "a" in drains, drains.hands_over("a")) == ([], True, True)
    await until_drained(router)
    assert (draining(router), "a" in drains, drains.hands_over("a")) == (["a"], True, False)


async def test_where_nobody_takes_over_an_engine_drains_at_once(supervisor: Supervisor) -> None:
    router = new_router("a", "b")
    Drains(router, supervisor, 0.0).begin("a")
    assert draining(router) == ["a"]
    drains = Drains(router, supervisor, 60.0)
    drains.begin("b")
    assert draining(router) == ["a", "b"]


async def test_the_last_engine_of_a_model_is_warned_of(supervisor: Supervisor) -> None:
    router = new_router("a", "b")
    (model,) = router.engines["a"].offer.models
    drains = Drains(router, supervisor, 0.0)
    with capture_logs() as logs:
        drains.begin("a")
        assert drains.alone("b") == [model]
        drains.begin("b")
    assert [(line["engine"], line["log_level"], line["alone_for"]) for line in logs] == [
        ("a", "info", None),
        ("b", "warning", [model]),
    ]


async def test_the_last_engine_that_stays_takes_over(supervisor: Supervisor) -> None:
    router = new_router("a", "b")
    drains = Drains(router, supervisor, 60.0)
    drains.begin("a")
    drains.begin("b")
    assert (draining(router), drains.hands_over("a")) == (["b"], True)


async def test_an_engine_gets_calls_again(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_set, "IDLE_S", 0.05)
    router = new_router("a", "b")
    drains = Drains(router, supervisor, 60.0)
    drains.begin("a")
    drains.cancel("a")
    assert "a" not in drains
    await asyncio.sleep(0.2)
    assert draining(router) == []
    drains.at_once("a")
    drains.cancel("a")
    assert draining(router) == []
