"""Sessions and variables against a gateway that says what it is told to: blocking and in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from plait.client import (
    AnswerError,
    Client,
    ClientError,
    ConnectionFailedError,
    GetTimeoutError,
    SemanticVariable,
    Session,
    Slo,
    Text,
    VariableFailedError,
    semantic_function,
)
from plait.client.flow import POLL_S
from plait.client.variable import Wanted
from tests.client.fake_gateway import CUT, Answer, FakeGateway, error, events

SUBMIT, GET, VARIABLES, SESSIONS = (f"POST /v1/{name}" for name in ("submit", "get", "variables", "sessions"))
REFUSED = error(400, "invalid_transform", "transform, character 1: no")


@semantic_function()
def step(text: Text) -> SemanticVariable:
    """Go on from {{text}}: {{then}}"""
    raise NotImplementedError


@semantic_function()
def join(left: Text, right: Text) -> SemanticVariable:
    """{{left}} {{right}} {{both}}"""
    raise NotImplementedError


def whats(fake: FakeGateway) -> list[str]:
    return [asked.what for asked in fake.asked]


def test_a_session_opens_and_closes_with_its_block(fake: FakeGateway, client: Client) -> None:
    with client.session(ttl_s=60) as session:
        assert fake.bodies(SESSIONS) == [{"session_id": session.id, "ttl_s": 60}]
    assert whats(fake) == [SESSIONS, f"DELETE /v1/sessions/{session.id}"]
    assert {asked.headers["authorization"] for asked in fake.asked} == {"Bearer secret"}


def test_two_sessions_are_not_the_same(client: Client) -> None:
    assert client.session().id != client.session().id
    assert client.session("ours").id == "ours"


def test_a_session_has_to_be_open(client: Client) -> None:
    session = client.session()
    with pytest.raises(RuntimeError, match="not open"):
        session.variable("x")
    with session:
        pass
    with pytest.raises(RuntimeError, match="not open"):
        step.on(session)("x")


@pytest.mark.parametrize("status", [404, 410])
def test_a_session_that_has_ended_already_is_closed(fake: FakeGateway, client: Client, status: int) -> None:
    with client.session() as session:
        fake.script(f"DELETE /v1/sessions/{session.id}", error(status, "not_there"))


def test_closing_does_not_hide_why_the_block_ended(fake: FakeGateway, client: Client) -> None:
    session = client.session()
    fake.script(f"DELETE /v1/sessions/{session.id}", error(500, "broken"), error(500, "broken"))
    with pytest.raises(KeyError), session:
        raise KeyError
    with pytest.raises(AnswerError, match="500"), session:
        pass


@pytest.mark.parametrize(
    ("objective", "criteria"),
    [
        (None, None),
        ("latency", "latency"),
        (Slo(ttft_s=0.5, jct_s=2.0), {"ttft_ms": 500.0, "jct_ms": 2000.0}),
    ],
)
def test_a_value_is_got_once(fake: FakeGateway, session: Session, objective: Wanted, criteria: object) -> None:
    then = step.on(session)("now")
    assert [then.get(objective), then.get()] == [f"text of {then.name}"] * 2
    (body,) = fake.bodies(GET)
    assert body["timeout_s"] == POLL_S
    assert body["criteria"] == criteria
    assert (body["session_id"], body["semantic_var_id"]) == (session.id, then.name)


def test_a_value_stays_when_the_session_has_ended(fake: FakeGateway, client: Client) -> None:
    with client.session() as session:
        text = session.variable("given")
        then = step(text)
        then.get()
    assert (text.get(), then.get()) == ("given", f"text of {then.name}")


def test_a_variable_of_somebody_else_is_got_by_name(fake: FakeGateway, session: Session) -> None:
    fake.values["draft"] = "theirs"
    assert session.variable(name="draft").get() == "theirs"
    assert fake.bodies(VARIABLES) == []
    with pytest.raises(TypeError, match="give a value, or the name"):
        session.variable()


def test_a_value_under_a_name_is_not_sent_twice(fake: FakeGateway, session: Session) -> None:
    fake.script(VARIABLES, CUT)
    with pytest.raises(ConnectionFailedError):
        session.variable("mine", name="draft")
    assert len(fake.bodies(VARIABLES)) == 1


def test_a_submission_whose_answer_is_lost_is_sent_again(fake: FakeGateway, session: Session) -> None:
    fake.script(SUBMIT, CUT, error(409, "double_producer"))
    assert step.on(session)("now").get()
    first, second = fake.submitted
    assert first == second


def test_a_refused_submission_is_raised_where_it_is_made(fake: FakeGateway, session: Session) -> None:
    fake.script(SUBMIT, REFUSED)
    with pytest.raises(AnswerError, match="transform, character 1") as caught:
        step.on(session)("now")
    assert (caught.value.status, caught.value.code) == (400, "invalid_transform")


def test_a_failed_variable_and_a_late_one(fake: FakeGateway, session: Session) -> None:
    then = step.on(session)("now")
    failed = error(424, "variable_failed", causes=["c2: its input failed", "c1: gone"])
    fake.script(GET, error(408, "get_timeout"), failed)
    with pytest.raises(GetTimeoutError):
        then.get(timeout_s=0.01)
    with pytest.raises(VariableFailedError, match="its input failed") as caught:
        then.get()
    assert [cause.message for cause in caught.value.causes] == ["c2: its input failed", "c1: gone"]


def test_a_gateway_that_is_not_there(fake: FakeGateway) -> None:
    nobody = Client("http://127.0.0.1:9/v1", max_retries=0, tls=False)
    with nobody, pytest.raises(ConnectionFailedError, match="POST /sessions"), nobody.session():
        pass
    with pytest.raises(ValueError, match="expected http://HOST:PORT/v1"):
        Client("127.0.0.1:8000")


def test_threads_share_a_session(fake: FakeGateway, session: Session) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(step.on(session), ["the same"] * 16))
    assert len(fake.submitted) == 16
    assert len(fake.bodies(VARIABLES)) == 1


def test_a_variable_does_not_slip_into_a_text(session: Session) -> None:
    then = step.on(session)("now")
    with pytest.raises(TypeError, match=r"call get\(\) first"):
        f"{then}"
    assert repr(then) == f"<SemanticVariable {then.name}>"


DELTAS: list[tuple[Answer, list[str]]] = [
    (events('{"delta": "Hel"}', '{"delta": "lo"}', '{"value": "Hello"}', "[DONE]"), ["Hel", "lo"]),
    (events('{"value": "Hello"}', "[DONE]"), ["Hello"]),
    (events('{"delta": "Hello"}', '{"value": "Hello"}'), ["Hello"]),
]


@pytest.mark.parametrize(("answer", "pieces"), DELTAS)
async def test_a_value_comes_in_pieces(
    fake: FakeGateway, client: Client, answer: Answer, pieces: Sequence[str]
) -> None:
    with client.session() as session:
        one, two = step.on(session)("now"), step.on(session)("later")
        fake.script(GET, answer, answer)
        assert list(one.stream("latency", timeout_s=5)) == pieces
        assert [piece async for piece in two.astream("latency", timeout_s=5)] == pieces
        for body in fake.bodies(GET):
            assert (body["stream"], body["timeout_s"], body["criteria"]) == (True, 5, "latency")
        assert one.get() == "".join(one.stream()) == "Hello", "kept"
        assert [piece async for piece in two.astream()] == ["Hello"]
        assert len(fake.bodies(GET)) == 2


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            events('{"delta": "Hel"}', '{"error": {"message": "c1: gone", "code": "variable_failed"}}'),
            VariableFailedError,
        ),
        (events('{"delta": "Hel"}', '{"error": {"message": "late", "code": "get_timeout"}}'), GetTimeoutError),
        (events('{"delta": "Hel"}', '{"error": {"message": "odd"}}'), AnswerError),
        (events('{"delta": "Hel"}'), ConnectionFailedError),
        (error(404, "not_found"), AnswerError),
        (CUT, ConnectionFailedError),
    ],
)
async def test_a_stream_that_breaks_says_why(
    fake: FakeGateway, client: Client, answer: Answer, expected: type[ClientError]
) -> None:
    with client.session() as session:
        then = step.on(session)("now")
        fake.script(GET, answer, answer)
        with pytest.raises(expected):
            list(then.stream())
        with pytest.raises(expected):
            _ = [piece async for piece in then.astream()]


async def test_calls_in_an_event_loop_return_before_anything_is_sent(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        first = step.on(session)("now")
        both = join(first, step(first))
        assert fake.submitted == []
        assert await both.aget() == f"text of {both.name}"
        assert len(fake.submitted) == 3
    assert whats(fake)[-1] == f"DELETE /v1/sessions/{session.id}"


async def test_what_was_not_waited_for_is_sent_before_the_session_ends(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        step.on(session)("now")
    assert whats(fake)[-2:] == [SUBMIT, f"DELETE /v1/sessions/{session.id}"]


async def test_a_refusal_reaches_whoever_waits_for_what_depends_on_it(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:
        fake.script(SUBMIT, REFUSED)
        bad = step(session.variable("now"))
        with pytest.raises(AnswerError, match="transform"):
            await bad.aget()
        last = join(step(bad), bad)
        with pytest.raises(VariableFailedError, match="step was refused, because transform, character 1") as caught:
            await last.aget()
        assert isinstance(caught.value.__cause__, AnswerError)
        assert await step(session.variable("other")).aget(), "not everybody's fault"
    assert len(fake.bodies(GET)) == 1


async def test_a_refusal_that_nobody_has_met_comes_at_the_end(fake: FakeGateway, client: Client) -> None:
    fake.script(VARIABLES, error(413, "value_too_large"))
    with pytest.raises(AnswerError, match="413"):
        async with client.session() as session:
            step.on(session)("now")


async def test_a_block_that_fails_sends_nothing_more_and_closes(fake: FakeGateway, client: Client) -> None:
    async def failing(session: Session) -> None:
        async with session:
            step.on(session)("now")
            raise KeyError

    session = client.session()
    with pytest.raises(KeyError):
        await failing(session)
    assert whats(fake) == [SESSIONS, f"DELETE /v1/sessions/{session.id}"]


async def test_an_event_loop_is_not_blocked_by_accident(client: Client) -> None:
    async with client.session() as session:
        then = step.on(session)("now")
        with pytest.raises(RuntimeError, match=r"await variable\.aget"):
            then.get()
        with pytest.raises(RuntimeError, match=r"await variable\.aget"):
            next(iter(then.stream()))
        with pytest.raises(RuntimeError, match="event loop in which it was entered"):
            await asyncio.to_thread(step.on(session), "now")


async def test_a_blocking_session_can_be_awaited_too(fake: FakeGateway, client: Client) -> None:
    with client.session() as session:
        then = step.on(session)("now")
        assert await then.aget() == f"text of {then.name}"
