"""An engine that was ejected: it is tried with one token until it answers, over the connections of real calls."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from plait.backends.errors import EngineError, EngineTimeoutError
from plait.gateway.fleet.health import HealthLimits, HealthState
from plait.gateway.membership import recovery
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    JSON,
    LOST,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
)
from tests.gateway.exposed import samples

AT_ONCE = HealthLimits(ejection_s=0.001, max_ejection_s=0.001, probe_s=0.001, max_probe_s=0.001, max_retry_after_s=0)


async def eject(made: Gateway) -> None:
    """Three calls fail on a; the first trial comes at once, maybe before the third call has its answer from b."""
    made.router.engines["a"].health.limits = AT_ONCE
    for _ in range(3):
        await made.deliver(Client())
    assert len(made.engines["a"].requests) >= 3


def whole() -> Exchange:
    return Exchange(headers=JSON, pieces=[WHOLE])


def streamed() -> Exchange:
    return Exchange(pieces=[FINISH + DONE])


async def until_up(made: Gateway) -> None:
    async with asyncio.timeout(2):
        while made.router.engines["a"].health.state is not HealthState.UP:  # noqa: ASYNC110 - of the trial's task
            await asyncio.sleep(0.001)


def trial_tasks() -> list[str]:
    """The names of the tasks that try an engine."""
    return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith("trial")]


@pytest.mark.parametrize(
    "bad",
    [
        LOST,
        EngineTimeoutError("silent"),
        None,
        Exchange(500, JSON, [b"{}"]),
        Exchange(429, [*JSON, (b"retry-after", b"1")], [b"{}"]),
        Exchange(200, JSON, [b"<html>"]),
        Exchange(200, JSON, [b'{"choices":[{"text":"x"}]}']),
    ],
    ids=["lost", "timeout", "hung", "500", "429", "garbled", "no ending"],
)
async def test_trials_go_on_until_one_passes_twice(bad: EngineError | Exchange | None) -> None:
    sick, well = FakeHttp(LOST, LOST, LOST, bad, whole(), streamed()), FakeHttp(*(whole() for _ in range(3)))
    async with gateway(sick, well, key=b"Bearer k") as made:
        await eject(made)
        await until_up(made)
        path, headers, body = sick.requests[-1]
        assert (path, headers[b"authorization"]) == ("/v1/completions", b"Bearer k")
        assert json.loads(body) == {"model": "m", "prompt": "Hello", "max_tokens": 1, "stream": True}
        assert (len(sick.requests), sick.answers) == (6, [])
        changes = {name: n for name, n in samples(made.registry).items() if "health_changes" in name and n}
        assert {name.split('"')[5] for name in changes} == {"suspect", "ejected", "probation", "up"}


async def test_an_engine_that_refuses_the_trial_itself_is_well() -> None:
    """An engine for embeddings has no completions."""
    refused = [Exchange(404, JSON, [b'{"detail":"Not Found"}']) for _ in range(2)]
    async with gateway(FakeHttp(LOST, LOST, LOST, *refused), FakeHttp(*(whole() for _ in range(3)))) as made:
        await eject(made)
        await until_up(made)


async def test_an_engine_that_goes_down_is_left_to_the_monitor() -> None:
    """Trials before it goes down are lost too; one that waits then ends with its wait."""
    async with gateway(FakeHttp(*[LOST] * 10_000), FakeHttp(*(whole() for _ in range(3)))) as made:
        await eject(made)
        assert trial_tasks()
        made.recovery.on_change(made.router.health.unreachable("a"))
        async with asyncio.timeout(2):
            while trial_tasks():  # noqa: ASYNC110 - of the trial's task
                await asyncio.sleep(0.001)
        assert made.router.engines["a"].health.state is HealthState.DOWN


async def test_an_engine_whose_streams_break_is_not_up() -> None:
    """Its whole answers are good, so that the first trial passes."""
    trials = [whole(), Exchange(pieces=[FINISH]), whole(), streamed()]
    async with gateway(FakeHttp(LOST, LOST, LOST, *trials), FakeHttp(*(whole() for _ in range(3)))) as made:
        await eject(made)
        await until_up(made)
        changes = samples(made.registry)
        assert changes['plait_engine_health_changes_total{cause="broken",engine="a",state="ejected"}'] == 1


async def test_a_call_that_its_engine_has_forgotten_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = asyncio.Event()
    bookings = [SimpleNamespace(give_up=None), SimpleNamespace(give_up=given_up.set)]
    monkeypatch.setattr(recovery, "HANG_CHECK_S", 0.001)
    monkeypatch.setattr(recovery, "forgotten", lambda *_: bookings)
    async with gateway(FakeHttp()) as made:
        made.recovery.open()
        await asyncio.wait_for(given_up.wait(), 2)
        made.recovery.close()
