"""Trials of engines that were ejected, and of engines that are quiet, over the connections of real calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from math import inf
from types import SimpleNamespace

import pytest

from plait.backends.errors import EngineError, EngineLostError, EngineTimeoutError
from plait.gateway.fleet.booking import SEVERAL_STREAMS
from plait.gateway.fleet.health import HealthLimits, HealthState
from plait.gateway.membership import recovery
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    HASHES,
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
from tests.waiting import WITHIN_S

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
    async with asyncio.timeout(WITHIN_S):
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
        Exchange(200, JSON, [b'{"choices":[{"text":"x","finish_reason":"abort"}]}']),
    ],
    ids=["lost", "timeout", "hung", "500", "429", "garbled", "given up"],
)
async def test_trials_go_on_until_one_passes_twice(bad: EngineError | Exchange | None) -> None:
    sick, well = FakeHttp(LOST, LOST, LOST, bad, whole(), streamed()), FakeHttp(*(whole() for _ in range(3)))
    async with gateway(sick, well, key=b"Bearer k") as made:
        await eject(made)
        await until_up(made)
        path, headers, body = sick.requests[-1]
        assert (path, headers[b"authorization"]) == ("/v1/completions", b"Bearer k")
        assert json.loads(body) == {"model": "m", "prompt": "Hello", "max_tokens": 2, "stream": True}
        assert (len(sick.requests), sick.answers) == (6, [])
        changes = {name: n for name, n in samples(made.registry).items() if "health_changes" in name and n}
        assert {name.split('"')[5] for name in changes} == {"suspect", "ejected", "probation", "up"}


async def test_an_engine_that_refuses_the_trial_itself_is_well() -> None:
    """An engine for embeddings has no completions, and no chat."""
    refused = [Exchange(404, JSON, [b'{"detail":"Not Found"}']) for _ in range(4)]
    async with gateway(FakeHttp(LOST, LOST, LOST, *refused), FakeHttp(*(whole() for _ in range(3)))) as made:
        await eject(made)
        await until_up(made)


async def test_an_engine_that_goes_down_is_left_to_the_monitor() -> None:
    """Trials before it goes down are lost too; one that waits then ends with its wait."""
    async with gateway(FakeHttp(*[LOST] * 10_000), FakeHttp(*(whole() for _ in range(3)))) as made:
        await eject(made)
        assert trial_tasks()
        for change in made.router.health.unreachable("a"):
            made.recovery.on_change(change)
        async with asyncio.timeout(WITHIN_S):
            while trial_tasks():  # noqa: ASYNC110 - of the trial's task
                await asyncio.sleep(0.001)
        assert made.router.engines["a"].health.state is HealthState.DOWN


async def test_an_engine_whose_streams_break_is_not_up() -> None:
    """Its whole answers are good, so that the first trial passes."""
    trials = [whole(), Exchange(pieces=[b'data: {"choices":[{"index":0}]}\n\n']), whole(), streamed()]
    async with gateway(FakeHttp(LOST, LOST, LOST, *trials), FakeHttp(*(whole() for _ in range(3)))) as made:
        await eject(made)
        await until_up(made)
        changes = samples(made.registry)
        assert changes['plait_engine_health_changes_total{cause="broken",engine="a",state="ejected"}'] == 1


@pytest.mark.parametrize(
    ("verdict", "error"),
    [
        ("outlasting", EngineTimeoutError),
        ("abandoned", EngineTimeoutError),
        ("overtaken", EngineLostError),
        ("overdue", EngineLostError),
    ],
)
async def test_a_call_without_a_hope_is_given_up(
    verdict: str, error: type[EngineError], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
    placement = SimpleNamespace(engine_id="a")
    ends = (None, given_up.set_result)
    bookings = [SimpleNamespace(give_up=end, placement=placement) for end in ends]
    monkeypatch.setattr(recovery, "HANG_CHECK_S", 0.001)
    async with gateway(FakeHttp()) as made:
        monkeypatch.setattr(made.router.health, verdict, lambda *_: [] if given_up.done() else bookings)
        made.recovery.open()
        assert type(await asyncio.wait_for(given_up, WITHIN_S)) is error
        made.recovery.close()


# Quiet engines.


def quiet_engine(made: Gateway, *, streams: int = 1) -> None:
    """The engine has begun streams, and does not go on with them."""
    for _ in range(streams):
        call = Call("c", "m", 10, 64, HASHES[:0])
        begun_s = loop_time_s() - 9.0
        made.router.first_token(made.router.book(call, made.router.select(call, begun_s, prefer="a"), begun_s), begun_s)


def end_streams(made: Gateway) -> None:
    for booking in [*made.router.engines["a"].progress._streaming]:
        made.router.release(booking, loop_time_s(), delivered=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - of the task that asks
            await asyncio.sleep(0.001)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are looked at all the time, and asked again at once."""
    monkeypatch.setattr(recovery, "HANG_CHECK_S", 0.001)
    monkeypatch.setattr(recovery, "ASK_AGAIN_S", 0.001)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("streams", "answer"), [(3, whole()), (4, streamed())])
async def test_a_quiet_engine_that_computes_keeps_its_streams(streams: int, answer: Exchange) -> None:
    """Where many streams are silent at the same time, the trial is one, too."""
    sick = FakeHttp(answer)
    async with gateway(sick, FakeHttp()) as made:
        quiet_engine(made, streams=streams)
        made.recovery.open()
        await until(lambda: bool(sick.requests))
        await until(lambda: made.router.engines["a"].asked_s == inf)
        _, headers, body = sick.requests[0]
        assert headers[b"x-request-id"].startswith(b"plait-trial-")
        assert json.loads(body)["stream"] is (streams >= SEVERAL_STREAMS)
        assert (made.router.engines["a"].health.state, sick.lost) == (HealthState.UP, [])
        end_streams(made)
        made.recovery.close()


@pytest.mark.usefixtures("often")
async def test_a_quiet_engine_that_answers_no_trial_is_ejected_with_all_its_calls() -> None:
    sick = FakeHttp(*[None] * 100)
    async with gateway(sick, FakeHttp()) as made:
        quiet_engine(made)
        made.recovery.open()
        await until(lambda: made.router.engines["a"].health.state is HealthState.EJECTED)
        assert sick.lost == [("hung", False)]
        end_streams(made)
        made.recovery.close()


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("said", [Exchange(401, JSON, [b"{}"]), Exchange(500, JSON, [b"{}"]), LOST])
async def test_an_engine_that_cannot_be_asked_is_asked_again_and_keeps_its_streams(
    said: Exchange | EngineError,
) -> None:
    sick = FakeHttp(said, whole())
    async with gateway(sick, FakeHttp()) as made:
        quiet_engine(made)
        made.recovery.open()
        await until(lambda: len(sick.requests) == 2)
        await until(lambda: made.router.engines["a"].asked_s == inf)
        assert (made.router.engines["a"].health.state, sick.lost) == (HealthState.UP, [])
        end_streams(made)
        made.recovery.close()


@pytest.mark.usefixtures("often")
async def test_an_engine_without_completions_is_asked_for_a_chat() -> None:
    sick = FakeHttp(Exchange(404, JSON, [b"{}"]), whole(), whole())
    async with gateway(sick, FakeHttp()) as made:
        quiet_engine(made)
        made.recovery.open()
        await until(lambda: len(sick.requests) == 2)
        await until(lambda: made.router.engines["a"].asked_s == inf)
        made.router.health.answered("a", {"m": None}, routes=["/v1/chat/completions"])
        made.router.engines["a"].progress.proved("m", -inf, -inf, streamed=True)
        await until(lambda: len(sick.requests) == 3)
        assert [path for path, _, _ in sick.requests] == ["/v1/completions", *["/v1/chat/completions"] * 2]
        end_streams(made)
        made.recovery.close()
