"""Calls that wait for their engine, over the relay: they go when it has room, and leave when their client goes."""

from __future__ import annotations

import asyncio

import pytest

from plait.backends.errors import LimitError, NoEngineError, OverloadedError
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.rate_leases import Amounts, Drawn, RateLeases
from plait.gateway.admission.tenants import TenantLimits
from plait.gateway.asgi import AsgiSink, ClientGoneError
from plait.gateway.calls.answer_headers import LEAST_WAIT_S
from plait.gateway.intake.agents import NOBODY, Agent
from plait.gateway.timer import loop_time_s
from plait.policy.order import Rank
from plait.policy.types import Objective
from tests.gateway.calls.scripted_engines import (
    DONE,
    FINISH,
    JSON,
    STREAM,
    WHOLE,
    Client,
    Exchange,
    FakeHttp,
    Gateway,
    gateway,
    leaves,
    until_stuck,
)
from tests.invariants import check_admission
from tests.waiting import WITHIN_S

STREAMED = b'{"model": "m", "prompt": "x", "stream": true}'


def close_gate(made: Gateway) -> None:
    """From now on all slots of the engine are taken."""
    made.router.engines["a"].view.slots = -1


def open_gate(made: Gateway) -> None:
    made.router.engines["a"].view.slots = 0
    made.router.on_room("a")


def waiting_calls(made: Gateway) -> list[Waiting]:
    return list(made.gate.admission.queue.backlogs["m"]._tenants[""].calls)


def whole() -> Exchange:
    return Exchange(headers=JSON, pieces=[WHOLE])


async def test_calls_wait_while_their_engine_is_full_and_go_in_turn() -> None:
    async with gateway(FakeHttp(whole(), whole(), whole())) as made:
        close_gate(made)
        clients = [Client() for _ in range(3)]
        tasks = [asyncio.create_task(made.deliver(client)) for client in clients]
        await until_stuck()
        assert (made.gate.admission.waiting("m"), made.engines["a"].requests) == (3, [])
        open_gate(made)
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*tasks)
        assert [client.status for client in clients] == [200] * 3
        assert made.outcomes() == {("a", "ok"): 3}
        check_admission(made.gate.admission, [])


async def test_a_call_whose_client_goes_while_it_waits_is_never_sent() -> None:
    async with gateway(FakeHttp()) as made:
        close_gate(made)
        await leaves(made, Client())
        assert made.gate.admission.waiting("m") == 0
        check_admission(made.gate.admission, [])


async def test_a_call_that_is_refused_has_not_used_what_was_leased_for_it() -> None:
    drawn, leased = list[tuple[float, ...]](), TenantLimits(calls_per_s=1)

    async def draw(_tenant: str, _rates: Amounts, _least: Amounts, most: Amounts) -> Drawn:
        drawn.append(most)
        return Drawn((1.0, most.tokens), (1.0, 0.0))

    async with gateway(FakeHttp()) as made:
        made.gate.leases = RateLeases(lambda _tenant: leased, draw)
        made.router.engines["a"].draining = True
        made.router.models.refresh()
        for _ in range(2):
            with pytest.raises(NoEngineError):
                await made.deliver(Client())
    assert len(drawn) == 1, "the second call has the lease of the first"


def leased(made: Gateway, held: asyncio.Event | None = None) -> None:
    """From now on the gateways' store has a part in the rates. It answers when `held` is set."""

    async def draw(_tenant: str, _rates: Amounts, _least: Amounts, most: Amounts) -> Drawn:
        if held is not None:
            await held.wait()
        return Drawn((1.0, most.tokens), (1.0, 0.0))

    limits = TenantLimits(calls_per_s=1)
    made.gate.leases = RateLeases(lambda _tenant: limits, draw)


async def test_a_call_that_the_store_allows_is_sent_or_waits() -> None:
    async with gateway(FakeHttp(whole(), whole())) as made:
        leased(made)
        await made.deliver(Client())
        assert made.outcomes() == {("a", "ok"): 1}
    async with gateway(FakeHttp(whole())) as made:
        leased(made)
        close_gate(made)
        call = asyncio.create_task(made.deliver(Client()))
        await until_stuck()
        assert (call.done(), made.gate.admission.waiting("m")) == (False, 1)
        open_gate(made)
        await asyncio.wait_for(call, WITHIN_S)
        assert made.outcomes() == {("a", "ok"): 1}


@pytest.mark.parametrize("others_wait", [False, True])
async def test_objectives_that_change_while_the_store_is_asked_are_what_the_call_enters_with(
    *, others_wait: bool
) -> None:
    async with gateway(FakeHttp(whole(), whole())) as made:
        held, clients = asyncio.Event(), list[asyncio.Task[object]]()
        close_gate(made)
        if others_wait:
            clients.append(asyncio.create_task(made.deliver(Client())))
            await until_stuck()
        leased(made, held)
        asked = made.asked(handle="h")
        clients.append(asyncio.create_task(made.relay.run(asked, AsgiSink(Client().send))))
        await until_stuck()
        made.relay.refine("h", asked.call._replace(objective=Objective.THROUGHPUT))
        held.set()
        await until_stuck()
        assert waiting_calls(made)[-1].rank is Rank.THROUGHPUT
        open_gate(made)
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*clients)
        check_admission(made.gate.admission, [])


async def test_a_client_that_goes_while_the_store_is_asked_leaves_nothing() -> None:
    async with gateway(FakeHttp()) as made:
        held = asyncio.Event()
        leased(made, held)
        await leaves(made, Client())
        check_admission(made.gate.admission, [])
        held.set()
        await until_stuck()  # the store is asked for all of a tenant's calls together, and answers


async def test_a_defect_while_the_store_is_asked_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(*_: object) -> bool:
        raise KeyError("a defect")

    monkeypatch.setattr(RateLeases, "take", take)
    async with gateway(FakeHttp()) as made:
        leased(made)
        with pytest.raises(KeyError, match="a defect"):
            await made.deliver(Client())
        check_admission(made.gate.admission, [])


async def test_what_is_too_much_is_refused_before_it_is_sent() -> None:
    async with gateway(FakeHttp()) as made:
        close_gate(made)
        waiting = asyncio.create_task(made.deliver(Client()))
        await until_stuck()
        made.gate.admission.queue._max_wait_s = 0.0
        with pytest.raises(OverloadedError):
            await made.deliver(Client())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        check_admission(made.gate.admission, [])


# Streams are told while they wait.


def streamed(status: int = 200) -> Exchange:
    if status != 200:
        return Exchange(status=status, headers=JSON, pieces=[b'{"error":{"message":"too long","code":"c"}}'])
    return Exchange(headers=STREAM, pieces=[FINISH, DONE])


async def told_stream(made: Gateway, client: Client) -> asyncio.Task[None]:
    """A stream that has been told twice that it waits."""
    close_gate(made)
    task = asyncio.create_task(made.deliver(client, body=STREAMED))
    await until_stuck()
    for at_s in (10.0, 20.0):
        made.relay.silent_streams.look(loop_time_s() + at_s)
    await until_stuck()
    assert len(client.sent) == 3
    return task


async def test_a_stream_that_waits_is_told_its_place_and_then_the_headers_of_its_answer() -> None:
    async with gateway(FakeHttp(streamed())) as made:
        client = Client()
        task = await told_stream(made, client)
        assert (client.status, client.headers[b"x-request-id"]) == (200, b"r1")
        assert client.headers[b"x-accel-buffering"] == b"no"
        assert client.body.startswith(b": waiting position=1 expected_s=")
        await asyncio.sleep(LEAST_WAIT_S)
        open_gate(made)
        await task
        (ours,) = [line for line in client.body.split(b"\n\n") if line.startswith(b": plait-")]
        assert ours.startswith(b": plait-engine=a plait-placement=")
        assert b"plait-waited-s=0." in ours
        assert client.body.endswith(FINISH + DONE)
        assert client.ended


async def test_a_stream_that_need_not_wait_long_is_not_told() -> None:
    async with gateway(FakeHttp(streamed())) as made:
        client = Client()
        await made.deliver(client, body=STREAMED)
        assert client.headers[b"plait-engine"] == b"a"
        assert client.body == FINISH + DONE


@pytest.mark.parametrize("status", [400, 500])
async def test_after_the_status_an_engines_error_is_an_event(status: int) -> None:
    async with gateway(FakeHttp(*(streamed(status) for _ in range(3)))) as made:
        client = Client()
        task = await told_stream(made, client)
        open_gate(made)
        await task
        last = client.body.removesuffix(b"\n\n").split(b"\n\n")[-1]
        assert b"too long" in last
        assert last.startswith(b'data: {"error":')
        assert client.ended


async def test_a_stream_that_was_told_and_is_given_up_gets_an_event() -> None:
    async with gateway(FakeHttp()) as made:
        client = Client()
        task = await told_stream(made, client)
        made.router.health.unreachable("a")
        await task
        assert b'"code":"no_engine_available"' in client.body
        assert client.ended
        check_admission(made.gate.admission, [])


async def test_a_client_that_goes_while_it_is_told_frees_its_place() -> None:
    async with gateway(FakeHttp()) as made:
        client = Client()
        task = await told_stream(made, client)
        client.gone.set()
        with pytest.raises(ClientGoneError):
            await task
        assert made.gate.admission.waiting("m") == 0


async def test_a_whole_answer_is_told_nothing() -> None:
    async with gateway(FakeHttp(whole())) as made:
        close_gate(made)
        client = Client()
        task = asyncio.create_task(made.deliver_whole(client))
        await asyncio.sleep(0.05)
        made.relay.silent_streams.look(loop_time_s() + 30.0)
        assert client.sent == []
        open_gate(made)
        await task
        assert client.status == 200
        assert float(client.headers[b"plait-waited-s"]) >= 0.04


async def test_a_whole_answer_that_waits_too_long_is_told_to_come_back_and_keeps_its_place() -> None:
    async with gateway(FakeHttp(whole(), whole())) as made:
        close_gate(made)
        made.gate._hold_s = 0.02
        first = asyncio.create_task(made.deliver_whole(Client()))
        with pytest.raises(LimitError) as raised:
            await first
        assert (raised.value.code, raised.value.status) == ("waiting", 429)
        assert raised.value.retry_after_s == 1.0
        made.gate._hold_s = 60.0
        other = asyncio.create_task(made.deliver_whole(Client(), prompt_tokens=200))
        await until_stuck()
        again = asyncio.create_task(made.deliver_whole(Client()))
        await until_stuck()
        places = {call.call.prompt_tokens: call.is_back for call in waiting_calls(made)}
        assert places == {257: True, 200: False}
        open_gate(made)
        await asyncio.gather(other, again)
        check_admission(made.gate.admission, [])


async def test_a_refused_call_is_not_counted_as_running() -> None:
    async with gateway(FakeHttp(whole())) as made:
        made.router.health.unreachable("a")
        with pytest.raises(Exception, match="No engine"):
            await made.deliver(Client())
        check_admission(made.gate.admission, [])


async def test_contexts_go_by_the_agent_and_turns_by_the_run() -> None:
    async with gateway(FakeHttp()) as made:
        close_gate(made)
        told = {}
        for agent in (Agent("r/a", "r", "r", is_final=True), Agent(run="r"), NOBODY):
            asked = made.asked(turn_of=agent.name or "k", agent=agent)
            entry = made.gate.enter(asked, None, lambda _: None, may_leave=False)
            told[agent] = (entry.waiting.session, entry.waiting.conversation, entry.waiting.is_final)
            made.gate.gone(entry)
        assert list(told.values()) == [("r/a", "r", True), ("k", "r", False), ("k", "k", False)]
