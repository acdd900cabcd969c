from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from plait.gateway import supervision
from plait.gateway.metrics import new_registry
from plait.gateway.supervision import Supervisor
from tests.gateway.exposed import samples


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "RESTART_AFTER_S", 0.0)


async def test_a_task_that_fails_is_restarted_logged_and_counted() -> None:
    registry = new_registry()
    supervisor, runs = Supervisor(registry), 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise KeyError("a defect")
        await asyncio.Event().wait()

    with capture_logs() as logs:
        supervisor.start("monitor:a", work)
        while runs < 3:  # noqa: ASYNC110 - of the supervisor's own task
            await asyncio.sleep(0)
    assert [entry["event"] for entry in logs] == ["task failed and is restarted"] * 2
    assert samples(registry)['plait_task_restarts_total{task="monitor"}'] == 2
    await supervisor.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_task_that_returns_is_over() -> None:
    supervisor, runs = Supervisor(new_registry()), 0

    async def work() -> None:
        nonlocal runs
        runs += 1

    supervisor.start("trial:a", work)
    await asyncio.sleep(0.01)
    assert (runs, len(asyncio.all_tasks())) == (1, 1)
