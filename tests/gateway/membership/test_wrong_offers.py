"""Engines that refuse a model which they have listed: their models are read at once, and count from then on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.router import Router
from tests.gateway.membership.watched_engine import FakeEngine, report, until, watching

BOTH = {"data": [{"id": "m"}, {"id": "adapter", "parent": "m"}]}
BASE = {"data": [{"id": "m"}]}


def reads(fake: FakeEngine) -> int:
    return len([request for request in fake.requests if request.url.path == "/base/v1/models"])


@asynccontextmanager
async def reporting(monkeypatch: pytest.MonkeyPatch, fake: FakeEngine) -> AsyncIterator[Router]:
    """An engine that reports, with an adapter. In the time of a test, its models are not read for another reason."""
    fake.models, fake.reports = BOTH, [report(1, cursor=1)]
    async with watching(monkeypatch, fake) as router:
        await until(lambda: router.engines["a"].cache.reports is True)
        assert router.models.names == {"m", "adapter"}
        yield router
        assert router.engines["a"].health.state is HealthState.UP


async def test_a_refused_model_is_left_out_at_once_and_stays_out_if_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    async with reporting(monkeypatch, fake) as router:
        fake.models, before = BASE, reads(fake)
        router.health.lacks("a", "adapter")
        assert (router.models.names, set(router.models.takers)) == ({"m"}, {"m"})
        await until(lambda: reads(fake) == before + 1)
        fake.reports.append(report(1, 2, cursor=2))
        await until(lambda: not fake.reports)
        assert router.models.names == {"m"}


async def test_a_refused_model_that_is_listed_all_the_same_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    async with reporting(monkeypatch, fake) as router:
        for _ in range(2):
            router.health.lacks("a", "adapter")
            assert router.models.names == {"m"}
            await until(lambda: router.models.names == {"m", "adapter"})


async def test_reports_do_not_bring_a_refused_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    async with reporting(monkeypatch, fake) as router:
        fake.models, before = None, reads(fake)
        router.health.lacks("a", "adapter")
        await until(lambda: reads(fake) > before)
        for cursor in (2, 3):
            fake.reports.append(report(1, cursor, cursor=cursor))
            await until(lambda: not fake.reports)
        assert router.models.names == {"m"}


async def test_a_model_that_the_engine_does_not_list_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    async with reporting(monkeypatch, fake) as router:
        before = reads(fake)
        router.health.lacks("a", "other")
        fake.reports.append(report(1, 2, cursor=2))
        await until(lambda: not fake.reports)
        assert (router.models.names, reads(fake)) == ({"m", "adapter"}, before)
