"""The changed objectives of calls on their way: what their engines are told, and what counts in the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from plait.backends.errors import EngineError
from plait.backends.protocol.cache_state import CacheState, KvState, SchedulerState
from plait.gateway.asgi import AsgiSink
from plait.gateway.calls.call import Asked, Slot
from plait.policy.types import Objective, Slo
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    JSON,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
    until_stuck,
)
from tests.gateway.exposed import samples
from tests.invariants import check

LATENCY = Slo(ttft_s=1.0, tpot_s=0.04)


def known(count: int) -> Exchange:
    """The engine's answer to a request with changes."""
    return Exchange(headers=JSON, pieces=[b'{"known":%d}' % count])


def report(made: Gateway, engine: str, *, takes_objectives: bool = True) -> None:
    """The engine reports that its scheduler takes changed objectives, or that it takes none."""
    state = CacheState(
        engine=engine,
        kind="vllm",
        epoch="1",
        cursor=1,
        model="m",
        block_tokens=64,
        granularity_tokens=64,
        snapshot=True,
        stored=[],
        removed=[],
        kv=KvState(100, 100, 0),
        scheduler=SchedulerState("slo", takes_objectives=takes_objectives),
    )
    made.router.report(engine, state, 0.0)


def refine(made: Gateway, asked: Asked, slo: Slo | None, objective: Objective | None = Objective.LATENCY) -> None:
    """Change the objectives of the call with this handle."""
    assert asked.slot.handle is not None
    made.relay.refine(asked.slot.handle, asked.call._replace(slo=slo, objective=objective))


class Running:
    """Calls with the handles h0, h1, ... that the engine has taken and not answered."""

    def __init__(self, made: Gateway, count: int = 1) -> None:
        self.calls = [made.asked(handle=f"h{number}") for number in range(count)]
        self.tasks = [asyncio.create_task(made.relay.run(one, AsgiSink(Client().send))) for one in self.calls]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def told(http: FakeHttp) -> list[list[dict[str, Any]]]:
    """The bodies of the requests with changes."""
    return [msgspec.json.decode(body) for path, _, body in http.requests if path == "/call_objectives"]


def counted(made: Gateway, label: str) -> float:
    return samples(made.registry).get(f'plait_changed_objectives_total{{engine="a",told="{label}"}}', 0.0)


async def test_the_changes_of_one_event_go_in_one_request() -> None:
    http = FakeHttp(None, None, known(1))
    async with gateway(http, key=b"Bearer k") as made:
        report(made, "a")
        running = Running(made, 2)
        await until_stuck()
        xargs = [msgspec.json.decode(body)["vllm_xargs"] for _, _, body in http.requests]
        assert [one["plait_handle"] for one in xargs] == ["h0", "h1"]
        for asked in running.calls:
            refine(made, asked, None)
            refine(made, asked, LATENCY)
        await until_stuck()
        (items,) = told(http)
        assert [item["plait_handle"] for item in items] == ["h0", "h1"]
        assert all((item["plait_ttft_ms"], item["plait_objective"]) == (1000.0, "latency") for item in items)
        assert http.requests[-1][1][b"authorization"] == b"Bearer k"
        assert (counted(made, "yes"), counted(made, "no")) == (1, 1)
        await running.end()


async def test_while_an_engine_has_not_answered_changes_gather() -> None:
    stuck = Exchange(headers=JSON, pieces=[None])
    http = FakeHttp(None, stuck, known(1))
    async with gateway(http) as made:
        report(made, "a")
        running = Running(made)
        await until_stuck()
        for tpot_s in (1.0, 2.0, 3.0):
            refine(made, running.calls[0], Slo(tpot_s=tpot_s))
            await until_stuck()
        assert len(told(http)) == 1
        stuck.response.pieces.append(b'{"known":1}')
        stuck.response.finish()
        await until_stuck()
        assert [[item["plait_tpot_ms"] for item in items] for items in told(http)] == [[1000.0], [3000.0]]
        assert counted(made, "yes") == 2
        await running.end()


async def test_what_cannot_be_told_is_not_tried_again() -> None:
    refused, garbled = Exchange(404, JSON, [b"{}"]), Exchange(headers=JSON, pieces=[b"[]"])
    http = FakeHttp(None, EngineError("lost"), refused, garbled, known(7))
    async with gateway(http) as made:
        report(made, "a")
        running = Running(made)
        await until_stuck()
        for number in range(4):
            refine(made, running.calls[0], Slo(tpot_s=1.0 + number))
            await until_stuck()
        assert len(told(http)) == 4
        assert (counted(made, "no"), counted(made, "yes")) == (3, 1), "an engine cannot know more than it was told"
        assert made.router.engines["a"].health.takes_calls
        await running.end()


async def test_an_engine_that_takes_no_changes_is_told_none() -> None:
    http = FakeHttp(None)
    async with gateway(http) as made:
        running = Running(made)
        await until_stuck()
        refine(made, running.calls[0], LATENCY)
        report(made, "a", takes_objectives=False)
        refine(made, running.calls[0], None)
        await until_stuck()
        assert (told(http), counted(made, "no")) == ([], 2)
        await running.end()


async def test_only_news_for_the_engine_is_told() -> None:
    http = FakeHttp(None)
    async with gateway(http) as made:
        report(made, "a")
        running = Running(made)
        await until_stuck()
        (asked,) = running.calls
        refine(made, asked, Slo(), None)
        refine(made, msgspec.structs.replace(asked, slot=Slot(handle="other")), LATENCY)
        await until_stuck()
        assert told(http) == []
        await running.end()
        refine(made, asked, LATENCY)
        await until_stuck()
        assert told(http) == [], "it has ended"


async def test_a_call_that_moves_takes_its_newest_objectives_along() -> None:
    held = Exchange(pieces=[None])
    first, second = FakeHttp(held, known(1)), FakeHttp(Exchange(pieces=[FINISH + DONE]))
    async with gateway(first, second) as made:
        report(made, "a")
        report(made, "b")
        running = Running(made)
        await until_stuck()
        refine(made, running.calls[0], LATENCY)
        await until_stuck()
        held.response.fail(EngineError("engine lost"))
        await running.tasks[0]
        xargs = msgspec.json.decode(second.requests[0][2])["vllm_xargs"]
        assert (xargs["plait_tpot_ms"], xargs["plait_objective"]) == (40.0, "latency")
        assert samples(made.registry)['plait_good_calls_total{model="m",objective="latency",tenant=""}'] == 1


async def test_attainment_counts_the_newest_slo_and_placement_its_ttft() -> None:
    held = Exchange(pieces=[None])
    async with gateway(FakeHttp(held, known(1))) as made:
        report(made, "a")
        running = Running(made)
        await until_stuck()
        queue = made.router.engines["a"].view.queue
        assert (queue.tokens > 0, queue.on_time_tokens) == (True, 0)
        refine(made, running.calls[0], Slo(ttft_s=1e-9))
        assert queue.on_time_tokens == queue.tokens
        check(made.router)
        held.response.pieces.append(FINISH + DONE)
        held.response.finish()
        await running.tasks[0]
        key = 'plait_slo_calls_total{met="no",model="m",objective="latency",slo="ttft",source="promised",tenant=""}'
        assert samples(made.registry)[key] == 1


async def test_a_call_that_waits_is_sent_with_its_newest_objectives() -> None:
    http = FakeHttp(None)
    async with gateway(http) as made:
        report(made, "a")
        view = made.router.engines["a"].view
        view.slots = -1
        running = Running(made)
        await until_stuck()
        assert http.requests == []
        refine(made, running.calls[0], LATENCY)
        view.slots = 0
        made.router.on_room("a")
        await until_stuck()
        assert msgspec.json.decode(http.requests[0][2])["vllm_xargs"]["plait_ttft_ms"] == 1000.0
        await running.end()
