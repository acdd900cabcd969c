"""Sessions in an event loop: gets of several tasks, refusals, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from plait.client import AnswerError, Client, SemanticVariable, Session, Text, VariableFailedError, semantic_function
from tests.client.fake_gateway import CUT, PROGRAMS, Answer, FakeGateway, error, events

REFUSED = error(400, "invalid_transform", "transform, character 1: no", "calls[0].placeholders")


@semantic_function()
def step(text: Text) -> SemanticVariable:
    """Go on from {{text}}: {{then}}"""
    raise NotImplementedError


@semantic_function()
def join(left: Text, right: Text) -> SemanticVariable:
    """{{left}} {{right}} {{both}}"""
    raise NotImplementedError


async def test_a_program_in_an_event_loop_is_one_request(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        first = step.on(session)("now")
        both = join(first, step(first))
        assert await both.aget("latency") == f"text of {both.name}"
    assert [asked.what for asked in fake.asked] == [PROGRAMS, f"DELETE /v1/sessions/{session.id}"]
    assert [(len(body["calls"]), body.get("stream")) for body in fake.programs] == [(3, None)]
    assert len(fake.connections) == 1


async def test_gets_of_the_same_moment_are_one_request(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        made = [step.on(session)(str(number)) for number in range(4)]
        wanted = ["latency", "latency", "throughput", "latency"]
        gets = (variable.aget(objective) for variable, objective in zip(made, wanted, strict=True))
        values = await asyncio.gather(*gets, made[0].aget("latency"))
        assert values == [f"text of {one.name}" for one in (*made, made[0])]
        await asyncio.gather(step(made[0]).aget(timeout_s=1), step(made[1]).aget(timeout_s=2))
    first, *others = fake.programs
    assert (first["stream"], first["gets"]) == (
        True,
        {one.name: objective for one, objective in zip(made, wanted, strict=True)},
    )
    assert [(len(body["gets"]), len(body["calls"])) for body in others] == [(1, 2), (1, 1)], "two time-outs"


async def test_one_variable_for_two_objectives_is_two_requests(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        then = step.on(session)("now")
        await asyncio.gather(then.aget("latency"), then.aget("throughput"))
    assert sorted(str(*body["gets"].values()) for body in fake.programs) == ["latency", "throughput"]
    assert [len(body["calls"]) for body in fake.programs] == [1, 1], "the first may arrive last"


async def test_a_task_goes_on_when_its_own_value_is_there(fake: FakeGateway, client: Client) -> None:
    """The stream breaks off after the first value; the second is got again, by itself."""
    async with client.session() as session:
        one, two = step.on(session)("1"), step.on(session)("2")
        fake.script(PROGRAMS, events(("value", {"name": one.name, "value": "x"}), ("delta", {"name": two.name})))
        assert list(await asyncio.gather(one.aget(), two.aget())) == ["x", f"text of {two.name}"]
    assert [list(body["gets"]) for body in fake.programs] == [[one.name, two.name], [two.name]]


@pytest.mark.parametrize("trouble", [CUT, error(503, "gateway_stopping"), error(429, "overloaded", retry_after="0")])
async def test_gets_are_asked_again_when_the_gateway_is_in_trouble(
    fake: FakeGateway, client: Client, trouble: Answer
) -> None:
    async with client.session() as session:
        fake.script(PROGRAMS, *[trouble] * 2)
        one, two = step.on(session)("1"), step.on(session)("2")
        assert len(await asyncio.gather(one.aget(), two.aget())) == 2
    assert [len(body["calls"]) for body in fake.programs] == [2, 2, 2]


async def test_values_of_several_variables_come_in_one_answer(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        one, two = step.on(session)("1"), step.on(session)("2")
        assert await session.arun(one, two) == (f"text of {one.name}", f"text of {two.name}")
        assert (one.get(), str(two)) == await session.arun(one, two)
    assert "stream" not in fake.programs[0]


async def test_a_refusal_reaches_whoever_waits_for_what_depends_on_it(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        fake.script(PROGRAMS, REFUSED)
        bad = step(session.variable("now"))
        with pytest.raises(AnswerError, match="step: transform"):
            await bad.aget()
        last = join(step(bad), bad)
        with pytest.raises(VariableFailedError, match="step was refused, because step: transform") as caught:
            await last.aget()
        assert isinstance(caught.value.__cause__, AnswerError)
        assert await step(session.variable("other")).aget(), "not everybody's fault"
    assert len(fake.programs) == 2


async def test_a_refusal_is_for_the_tasks_that_need_the_call(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        fake.script(PROGRAMS, REFUSED)
        bad, good = step.on(session)("1"), step.on(session)("2")
        refused, value = await asyncio.gather(bad.aget(), good.aget(), return_exceptions=True)
        assert isinstance(refused, AnswerError)
        assert value == f"text of {good.name}"
    async with client.session() as session:
        fake.script(PROGRAMS, REFUSED)
        step.on(session)("1")
        good = step.on(session)("2")
        with pytest.raises(AnswerError, match="step: transform"):
            await good.aget()
        assert await good.aget()


async def test_a_get_that_is_cancelled_leaves_the_others_alone(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        one, two = step.on(session)("1"), step.on(session)("2")
        tasks = [asyncio.create_task(one.aget()), asyncio.create_task(two.aget())]
        await asyncio.sleep(0)
        tasks[0].cancel()
        assert await tasks[1]
        lost = asyncio.create_task(step(one).aget())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.wait([lost])
        assert await step(two).aget()
        assert len(fake.programs[-1]["calls"]) == 2, "what the cancelled request had is not lost"


async def test_a_block_that_fails_sends_nothing_and_closes(fake: FakeGateway, client: Client) -> None:
    async def failing(session: Session) -> None:
        async with session:
            step.on(session)("now")
            raise KeyError

    session = client.session()
    with pytest.raises(KeyError):
        await failing(session)
    assert [asked.what for asked in fake.asked] == [f"DELETE /v1/sessions/{session.id}"]


async def test_an_event_loop_is_not_blocked_by_accident(client: Client) -> None:
    async with client.session() as session:
        then = step.on(session)("now")
        for blocking in (then.get, lambda: str(then), lambda: next(iter(then.stream())), session.run):
            with pytest.raises(RuntimeError, match=r"await variable\.aget"):
                blocking()
        await session.arun()


async def test_threads_may_make_calls_of_a_session_in_an_event_loop(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        then = await asyncio.to_thread(step.on(session), "now")
        assert await then.aget() == f"text of {then.name}"


async def test_a_blocking_session_can_be_awaited_too(fake: FakeGateway, client: Client) -> None:
    with client.session() as session:
        then = step.on(session)("now")
        assert await then.aget() == f"text of {then.name}"
