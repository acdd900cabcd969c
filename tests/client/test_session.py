"""Sessions and variables against a gateway that says what it is told to: what is sent, when, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
from plait.client.objectives import Wanted
from tests.client.fake_gateway import CUT, PROGRAMS, Answer, FakeGateway, error, events, failed

REFUSED = error(400, "invalid_transform", "calls[0] (then): transform, character 1: no", "calls[0].placeholders")


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


# Sessions.


def test_a_session_is_made_by_its_first_program_and_ends_with_its_block(fake: FakeGateway, client: Client) -> None:
    with client.session(ttl_s=60) as session:
        then = step.on(session)("now")
        assert fake.asked == []
        then.get()
        (body,) = fake.programs
        assert (body["session"], body["ttl_s"]) == (session.id, 60)
    assert whats(fake) == [PROGRAMS, f"DELETE /v1/sessions/{session.id}"]
    assert {asked.headers["authorization"] for asked in fake.asked} == {"Bearer secret"}
    assert len(fake.connections) == 1


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


def test_calls_that_were_never_sent_are_warned_of(fake: FakeGateway, client: Client) -> None:
    with pytest.warns(RuntimeWarning, match="2 of its calls were never sent.*: step$"), client.session() as session:
        step(step.on(session)("now"))
    assert fake.submitted == []
    with client.session() as session:
        step.on(session)("now")
        session.run()
    assert len(fake.submitted) == 1
    session = client.session()
    with pytest.raises(TypeError, match="too many"), session:
        step(step.on(session)("now"), 1)  # type: ignore[call-arg]


# What is sent.


def test_a_program_is_one_request(fake: FakeGateway, session: Session) -> None:
    first = step.on(session)("now")
    both = join(first, step(first))
    assert fake.asked == []
    assert both.get("latency") == f"text of {both.name}"
    (program,) = fake.programs
    assert [len(program["values"]), len(program["calls"]), program["gets"]] == [1, 3, {both.name: "latency"}]
    assert program["timeout_s"] == POLL_S


def test_a_loop_of_dependent_gets_costs_a_request_each(fake: FakeGateway, session: Session) -> None:
    text = session.variable("now")
    for _ in range(3):
        text = step(text)
        text.get()
    assert [len(program["calls"]) for program in fake.programs] == [1, 1, 1]
    assert [len(program.get("values", {})) for program in fake.programs] == [1, 0, 0]
    assert len(fake.connections) == 1


def test_several_values_come_in_one_answer(fake: FakeGateway, session: Session) -> None:
    one, two = step.on(session)("1"), step.on(session)("2")
    assert session.run(one, two, session.variable("3"), objective="throughput") == (one.get(), two.get(), "3")
    assert [program["gets"] for program in fake.programs] == [{one.name: "throughput", two.name: "throughput"}]
    assert session.run(one) == (one.get(),)
    assert session.run() == ()
    assert len(fake.programs) == 1, "there was nothing to send"


@pytest.mark.parametrize(
    ("objective", "criteria"),
    [
        (None, None),
        ("latency", "latency"),
        (Slo(ttft_s=0.5, jct_s=2.0), {"slo_ttft_ms": 500.0, "slo_jct_ms": 2000.0}),
        ({"slo_tpot_ms": 40}, {"slo_tpot_ms": 40}),
    ],
)
def test_a_value_is_got_once(fake: FakeGateway, session: Session, objective: Wanted, criteria: object) -> None:
    then = step.on(session)("now")
    assert [then.get(objective), then.get(), str(then), f"{then}"] == [f"text of {then.name}"] * 4
    (body,) = fake.programs
    assert body["gets"] == {then.name: criteria}


def test_a_value_stays_when_the_session_has_ended(fake: FakeGateway, client: Client) -> None:
    with client.session() as session:
        text = session.variable("given")
        then = step(text)
        then.get()
    assert (text.get(), then.get()) == ("given", f"text of {then.name}")


def test_a_variable_of_somebody_else_is_got_by_name(fake: FakeGateway, session: Session) -> None:
    fake.values["draft"] = "theirs"
    draft = session.variable(name="draft")
    step(draft).get()
    assert draft.get() == "theirs"
    assert [program.get("external") for program in fake.programs] == [["draft"], ["draft"]]
    assert all("values" not in program for program in fake.programs)
    with pytest.raises(TypeError, match="give a value, or the name"):
        session.variable()


def test_a_variable_is_set_once(fake: FakeGateway, session: Session) -> None:
    session.variable("mine", name="draft")
    with pytest.raises(ClientError, match="draft has a value already"):
        session.variable("yours", name="draft")
    session.run()
    assert [program["values"] for program in fake.programs] == [{"draft": "mine"}]


def test_a_program_whose_answer_is_lost_is_sent_again(fake: FakeGateway, session: Session) -> None:
    fake.script(PROGRAMS, CUT)
    assert step.on(session)("now").get()
    first, second = fake.programs
    assert first | {"timeout_s": 0} == second | {"timeout_s": 0}


def test_what_was_not_sent_goes_with_the_next_program(fake: FakeGateway, session: Session) -> None:
    then = step.on(session)("now")
    fake.script(PROGRAMS, *[CUT] * 3, error(429, "too_many_waiting_calls"))
    with pytest.raises(ConnectionFailedError):
        then.get()
    with pytest.raises(AnswerError, match="429"):
        then.get()
    assert step(then).get()
    assert len(fake.programs[-1]["calls"]) == 2


def test_a_program_that_does_not_fit_into_one_request_is_several(
    fake: FakeGateway, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.client.collected.BATCH_CALLS", 2)
    then = step.on(session)("now")
    for _ in range(4):
        then = step(then)
    assert then.get()
    assert [len(program["calls"]) for program in fake.programs] == [2, 2, 1]
    assert [program.get("gets") for program in fake.programs] == [None, None, {then.name: None}]


# Errors.


def test_a_refusal_is_raised_where_the_program_is_sent_with_the_functions_name(
    fake: FakeGateway, session: Session
) -> None:
    bad, good = step.on(session)("now"), join.on(session)("so", "on")
    worse = step(step(bad))
    fake.script(PROGRAMS, REFUSED)
    with pytest.raises(AnswerError, match=r"^step: calls\[0\] \(then\): transform, character 1") as caught:
        worse.get()
    found = caught.value
    assert (found.status, found.code, found.function) == (400, "invalid_transform", "step")
    with pytest.raises(AnswerError, match="transform"):
        bad.get()
    with pytest.raises(VariableFailedError, match="step was refused, because step: calls") as failure:
        step(worse).get()
    assert isinstance(failure.value.__cause__, AnswerError)
    assert len(fake.programs) == 1, "it is known"
    assert good.get()
    assert [len(program["calls"]) for program in fake.programs] == [4, 1], "what was not at fault goes again"


def test_a_refused_value_can_be_given_again(fake: FakeGateway, session: Session) -> None:
    then = step.on(session)("long")
    (name,) = session._collected._producers.keys() - {then.name}
    fake.script(PROGRAMS, error(413, "value_too_large", f"values.{name}: no", f"values.{name}"))
    with pytest.raises(AnswerError, match=f"^variable {name}: "):
        then.get()
    assert step.on(session)("long").get()


def test_a_program_that_is_too_large_as_a_whole_is_given_up(fake: FakeGateway, session: Session) -> None:
    then = step.on(session)("now")
    fake.script(PROGRAMS, error(413, "body_too_large"))
    for _ in range(2):
        with pytest.raises(AnswerError, match="413"):
            then.get()
    assert step.on(session)("now").get()
    assert len(fake.programs) == 2


def test_a_failed_variable_and_a_late_one(fake: FakeGateway, session: Session) -> None:
    then = step.on(session)("now")
    fake.script(
        PROGRAMS,
        failed(then.name, "get_timeout", status=408),
        failed(then.name, "variable_failed", "c2: its input failed", "c1: gone"),
    )
    with pytest.raises(GetTimeoutError):
        then.get(timeout_s=0.01)
    with pytest.raises(VariableFailedError, match="its input failed") as caught:
        then.get()
    assert [cause.message for cause in caught.value.causes] == ["c2: its input failed", "c1: gone"]
    assert ["calls" in program for program in fake.programs] == [True, False]


def test_values_beside_a_failure_are_kept(fake: FakeGateway, session: Session) -> None:
    one, two = step.on(session)("1"), step.on(session)("2")
    problem = {"message": "no", "code": "variable_failed"}
    fake.script(PROGRAMS, Answer(200, {"object": "program", "values": {two.name: "x"}, "errors": {one.name: problem}}))
    with pytest.raises(VariableFailedError):
        session.run(one, two)
    assert two.get() == "x"
    assert len(fake.programs) == 1


def test_a_gateway_that_is_not_there(fake: FakeGateway) -> None:
    nobody = Client("http://127.0.0.1:9/v1", model="m", max_retries=0, tls=False)
    with (
        nobody,
        pytest.raises(ConnectionFailedError, match=r"POST http://127\.0\.0\.1:9/v1/programs: "),
        nobody.session() as session,
    ):
        step.on(session)("now").get()
    with pytest.raises(ValueError, match="expected http://HOST:PORT/v1"):
        Client("127.0.0.1:8000")


def test_an_answer_of_somebody_else_is_an_error(fake: FakeGateway, session: Session) -> None:
    fake.script(PROGRAMS, Answer(200, {"hello": "world"}))
    with pytest.raises(AnswerError, match="not a program's answer"):
        step.on(session)("now").get()
    session.run()


# Threads.


def test_threads_share_a_session(fake: FakeGateway, session: Session) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(step.on(session), ["the same"] * 16))
        assert list(pool.map(SemanticVariable.get, made)) == [f"text of {one.name}" for one in made]
    calls = {call["placeholders"][1]["semantic_var_id"] for call in fake.submitted}
    assert calls == {one.name for one in made}
    assert len({name for program in fake.programs for name in program.get("values", {})}) == 1


def test_a_variable_does_not_slip_into_a_text(session: Session) -> None:
    then = step.on(session)("now")
    with pytest.raises(TypeError, match=r"call get\(\) first"):
        f"{then}"
    assert repr(then) == f"<SemanticVariable {then.name}>"
    session.run()


# Streams.


def delta(text: str) -> tuple[str, dict[str, Any]]:
    return "delta", {"name": "v", "delta": text}


VALUE = ("value", {"name": "v", "value": "Hello", "truncated": False})
DELTAS: list[tuple[Answer, list[str]]] = [
    (events(delta("Hel"), delta("lo"), VALUE), ["Hel", "lo"]),
    (events(VALUE), ["Hello"]),
    (events(delta("Hello"), VALUE), ["Hello"]),
]


@pytest.mark.parametrize(("answer", "pieces"), DELTAS)
async def test_a_value_comes_in_pieces(
    fake: FakeGateway, client: Client, answer: Answer, pieces: Sequence[str]
) -> None:
    with client.session() as session:
        one, two = step.on(session)("now"), step.on(session)("later")
        fake.script(PROGRAMS, answer, answer)
        assert list(one.stream("latency", timeout_s=5)) == pieces
        assert [piece async for piece in two.astream("latency", timeout_s=5)] == pieces
        for body in fake.programs:
            assert (body["stream"], body["timeout_s"], list(body["gets"].values())) == (True, 5, ["latency"])
        assert [len(body.get("calls", [])) for body in fake.programs] == [2, 0]
        assert one.get() == "".join(one.stream()) == "Hello", "kept"
        assert [piece async for piece in two.astream()] == ["Hello"]
        assert len(fake.programs) == 2


def failure(**problem: str) -> tuple[str, dict[str, Any]]:
    return "failed", {"name": "v", "error": problem}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (events(delta("Hel"), failure(message="c1: gone", code="variable_failed")), VariableFailedError),
        (events(delta("Hel"), failure(message="late", code="get_timeout")), GetTimeoutError),
        (events(delta("Hel"), failure(message="odd")), AnswerError),
        (events(delta("Hel"), ("error", {"error": {"message": "odd"}})), AnswerError),
        (events(delta("Hel")), ConnectionFailedError),
        (error(401, "invalid_api_key"), AnswerError),
        (REFUSED, AnswerError),
        (CUT, ConnectionFailedError),
    ],
)
async def test_a_stream_that_breaks_says_why(
    fake: FakeGateway, client: Client, answer: Answer, expected: type[ClientError]
) -> None:
    with client.session() as session:
        then = step.on(session)("now")
        fake.script(PROGRAMS, answer, answer)
        with pytest.raises(expected):
            list(then.stream())
        with pytest.raises(expected):
            _ = [piece async for piece in then.astream()]
        fake.forget()
        session.run()


async def test_what_a_stream_was_left_before_its_end_had_is_sent_again(fake: FakeGateway, client: Client) -> None:
    """A gateway cancels the calls of a client that has gone."""
    with client.session() as session:
        one, other = step.on(session)("now"), step.on(session)("later")
        fake.script(PROGRAMS, events(delta("Hel"), delta("lo"), VALUE))
        pieces = one.stream()
        assert next(pieces) == "Hel"
        pieces.close()  # type: ignore[attr-defined]
        assert other.get()
        with client.session() as left:  # without a warning: the call was sent
            fake.script(PROGRAMS, events(delta("Hel"), delta("lo"), VALUE))
            assert next(step.on(left)("now").stream()) == "Hel"
    assert [len(body["calls"]) for body in fake.programs] == [2, 2, 1]
