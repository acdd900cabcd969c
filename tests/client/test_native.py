"""Native functions against a gateway that says what it is told to: what is sent, what runs, and what comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from plait.client import (
    AnswerError,
    Client,
    ClientError,
    NativeFunction,
    SemanticVariable,
    Session,
    TemplateError,
    Text,
    VariableFailedError,
    native_function,
    semantic_function,
)
from tests.client.fake_gateway import CUT, PROGRAMS, FakeGateway, error, events, failed
from tests.waiting import WITHIN_S

SET = "POST /v1/variables"


@semantic_function()
def step(text: Text) -> SemanticVariable:
    """Go on from {{text}}: {{then}}"""
    raise NotImplementedError


@native_function
def upper(text: str, mark: str = "!") -> str:
    return text.upper() + mark


@native_function(seconds=2.5)
async def joined(parts: list[str], end: str) -> str:
    await asyncio.sleep(0)
    return "+".join(parts) + end


@native_function
def broken(text: str) -> str:
    raise KeyError(text)


@native_function
def undecoded(text: str) -> str:
    return f"{text}\udcff"


@native_function
def counted(text: str) -> str:
    return len(text)  # type: ignore[return-value]


def eventually(answer: Callable[[], Any]) -> Any:
    """What it answers, once that is true."""
    deadline_s = time.monotonic() + WITHIN_S
    while not (found := answer()):
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    return found


def natives(fake: FakeGateway) -> list[list[dict[str, Any]]]:
    return [program.get("natives", []) for program in fake.programs]


def watches(fake: FakeGateway) -> list[dict[str, Any]]:
    """The requests for the inputs of steps."""
    return [program for program in fake.programs if program.get("stream") and "calls" not in program]


def programs(fake: FakeGateway) -> list[dict[str, Any]]:
    return [program for program in fake.programs if program not in watches(fake)]


# What is sent.


def test_a_step_travels_with_its_program(fake: FakeGateway, session: Session) -> None:
    first = step.on(session)("now")
    computed = upper(first)
    last = step(computed)
    assert fake.asked == []
    last.get("latency")
    (program,) = programs(fake)
    declared = [{"output": computed.name, "inputs": [first.name]}]
    assert (program["natives"], len(program["calls"]), program["gets"]) == (declared, 2, {last.name: "latency"})
    (watch,) = eventually(lambda: watches(fake))
    assert (watch["natives"], watch["gets"], watch["external"]) == (declared, {first.name: None}, [first.name])
    (sent,) = eventually(lambda: fake.bodies(SET))
    value = f"TEXT OF {first.name.upper()}!"
    assert sent == {"session_id": session.id, "semantic_var_id": computed.name, "value": value}


def test_texts_go_to_the_function_and_variables_to_the_gateway(fake: FakeGateway, session: Session) -> None:
    first, second = session.variable("a"), step.on(session)("b")
    session.run()
    joined([first, "x", second], end=".").get()
    (declared,) = next(filter(None, natives(fake)))
    assert (declared["inputs"], declared["seconds"]) == ([first.name, second.name], 2.5)
    assert sorted(programs(fake)[0]["values"].values()) == ["a", "b"], "neither x nor the end"
    (sent,) = eventually(lambda: fake.bodies(SET))
    assert sent["value"] == f"a+x+text of {second.name}."


def test_a_list_that_changes_later_changes_nothing(fake: FakeGateway, session: Session) -> None:
    parts: list[Text] = [step.on(session)("a")]
    computed = joined(parts, ".")
    parts.append(step.on(session)("b"))
    computed.get()
    (sent,) = eventually(lambda: fake.bodies(SET))
    assert "+" not in sent["value"]


def test_a_step_of_texts_alone_waits_for_them(fake: FakeGateway, client: Client, session: Session) -> None:
    upper.on(session)("known", mark="?").get()
    (sent,) = eventually(lambda: fake.bodies(SET))
    assert sent["value"] == "KNOWN?"
    assert client.run(upper, "known").startswith("text of upper_")


def test_names_that_are_no_names_of_variables(fake: FakeGateway, session: Session) -> None:
    made = native_function(lambda text: text).on(session)("x")
    assert made.name.startswith("_lambda__")
    made.get()


def test_steps_count_as_calls_of_a_request(
    fake: FakeGateway, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.client.collected.BATCH_CALLS", 2)
    monkeypatch.setattr("plait.client.native_steps.BATCH_CALLS", 2)
    then: SemanticVariable = session.variable("now")
    for _ in range(3):
        then = upper(step(then))
    then.get()
    assert [(len(one["calls"]), len(one["natives"])) for one in programs(fake)] == [(1, 1)] * 3
    eventually(lambda: len(fake.bodies(SET)) == 3)
    assert sorted(len(one["natives"]) for one in watches(fake)) == [1, 2]


def test_steps_that_were_never_sent_are_warned_of(client: Client) -> None:
    with pytest.warns(RuntimeWarning, match="2 of its calls were never sent.*: step, upper$"), client.session() as one:
        upper(step.on(one)("now"))


# What runs.


async def test_functions_run_in_an_event_loop(fake: FakeGateway, client: Client) -> None:
    async with client.session() as session:

        async def one(text: str) -> str:
            return await joined([upper(step.on(session)(text))], ".").aget()

        await asyncio.gather(*map(one, "abcd"))
        await asyncio.to_thread(eventually, lambda: len(fake.bodies(SET)) == 8)
        assert len(watches(fake)) == 1, "those of one turn of the loop are watched together"


async def test_a_blocking_session_can_be_awaited_too(fake: FakeGateway, client: Client) -> None:
    with client.session() as session:
        computed = upper(step.on(session)("now"))
        assert await computed.aget() == f"text of {computed.name}"
        await asyncio.to_thread(eventually, lambda: fake.bodies(SET))
        await step(upper(computed)).aget()
    await asyncio.wait_for(session._natives.aend(), WITHIN_S)


async def test_the_end_of_a_session_cancels_what_runs(fake: FakeGateway, client: Client) -> None:
    begun, ended = asyncio.Event(), list[str]()

    @native_function
    async def slow(text: str) -> str:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(text)
            raise
        return text

    async with client.session() as session:
        slow.on(session)("x")
        await session.arun()
        await begun.wait()
    assert ended == ["x"]
    assert fake.bodies(SET) == []


def test_a_closed_client_has_no_function_that_runs(fake: FakeGateway) -> None:
    ran: list[str] = []

    @native_function
    def slow(text: str) -> str:
        time.sleep(0.05)
        ran.append(text)
        return text

    client = Client(fake.base_url, model="demo", tls=False)
    with client, client.session() as session:
        for number in range(100):
            slow.on(session)(str(number))
        session.run()
        eventually(lambda: ran)
    before = len(ran)
    assert before < 100, "not all have begun"
    time.sleep(0.1)
    assert len(ran) == before


@pytest.mark.parametrize("trouble", [CUT, error(503, "gateway_stopping"), error(429, "overloaded", retry_after="0")])
def test_a_watch_goes_on_after_trouble(fake: FakeGateway, session: Session, trouble: Any) -> None:
    first = step.on(session)("now")
    session.run(first)
    fake.script(PROGRAMS, trouble, trouble)  # to the program, or to its watch
    upper(first).get()
    eventually(lambda: fake.bodies(SET))


def test_a_watch_that_was_given_up_begins_again_with_the_next_get(fake: FakeGateway, session: Session) -> None:
    computed = upper.on(session)("now")
    fake.script(PROGRAMS, *[CUT] * 7)
    session._natives.start()
    eventually(lambda: session._natives._new)
    fake.forget()
    computed.get()
    eventually(lambda: fake.bodies(SET))


# Failures.


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken, "broken raised KeyError: 'now'"),
        (counted, "counted returned int; a native function returns a str"),
        (undecoded, "undecoded raised UnicodeEncodeError: 'utf-8' codec can't encode character '\\udcff'"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_that_fails_fails_its_variable(
    fake: FakeGateway, client: Client, function: NativeFunction, message: str, *, is_async: bool
) -> None:
    async with client.session() as session:
        computed = function.on(session)("now")
        if is_async:
            await session.arun()
        else:
            session._natives.start()
        (sent,) = await asyncio.to_thread(eventually, lambda: fake.bodies(SET))
        assert sent["error"].startswith(message)
        cause = {"message": message, "variable": computed.name}
        problem = {"message": "no", "code": "variable_failed", "causes": [cause]}
        fake.script(PROGRAMS, events(("failed", {"name": computed.name, "error": problem})))
        with pytest.raises(VariableFailedError, match="has failed: ") as caught:
            _ = [piece async for piece in computed.astream()]
        assert type(caught.value.__cause__) in {KeyError, ClientError, UnicodeEncodeError}


def test_a_result_that_the_gateway_refuses_is_why_the_variable_fails(fake: FakeGateway, session: Session) -> None:
    computed = upper.on(session)("now")
    fake.script(SET, error(413, "value_too_large", "too large"))
    computed.get()
    _, told = eventually(lambda: len(fake.bodies(SET)) == 2 and fake.bodies(SET))
    assert told["error"] == "the result of upper was refused: too large"


def test_a_refused_step_names_its_function_and_does_not_run(fake: FakeGateway, session: Session) -> None:
    first = step.on(session)("now")
    upper(first)
    wrong = joined([first], "")
    refusal = error(409, "cycle", "natives[1] (x): no", "natives[1].inputs")
    fake.script(PROGRAMS, refusal)
    batches = session._collected.batches()
    with pytest.raises(AnswerError, match=r"^joined: natives\[1\]") as caught, batches[0].sent():
        raise AnswerError("natives[1] (x): no", status=409, param="natives[1].inputs")
    assert caught.value.function == "joined"
    fake.forget()
    with pytest.raises(AnswerError, match="joined: "):
        wrong.get()
    with pytest.raises(VariableFailedError, match="joined was refused"):
        upper(step(wrong)).get()
    session.run(first)
    eventually(lambda: fake.bodies(SET))
    assert [[one["output"][:5] for one in declared] for declared in natives(fake)] == [["upper"]] * 2


def test_a_step_whose_input_failed_never_runs(fake: FakeGateway, client: Client, session: Session) -> None:
    first = step.on(session)("now")
    fake.script(PROGRAMS, failed(first.name, "variable_failed", "gone"))
    with pytest.raises(VariableFailedError):
        first.get()
    broken(first)
    problem = {"message": "no", "code": "skipped", "causes": []}
    fake.script(PROGRAMS, *[events(("failed", {"name": first.name, "error": problem}))])
    session._natives.start()
    eventually(lambda: not client._connection.natives._watches)
    assert len(watches(fake)) == 1
    assert fake.bodies(SET) == []
    session.run()
    assert "natives" in fake.programs[-1]


# Definitions and arguments.


def test_what_is_not_a_native_function() -> None:
    with pytest.raises(TemplateError, match=r"many: the parameter \*texts: 'str' cannot be an input"):

        @native_function
        def many(*texts: str) -> str:
            return "".join(texts)

    for seconds in (-1.0, 1e6, float("nan")):
        with pytest.raises(TemplateError, match="expected 0 to 86,400"):
            native_function(seconds=seconds)
    assert repr(upper) == "<NativeFunction upper(text: 'str', mark: 'str' = '!') -> 'str'>"
    assert upper.__wrapped__("x") == "X!"  # type: ignore[attr-defined]


def test_arguments_that_a_step_cannot_take(client: Client, session: Session) -> None:
    text = session.variable("x")
    with client.session() as other, pytest.raises(TemplateError, match="upper: mark is a variable of another"):
        upper(text, other.variable("y", name="y"))
    with pytest.raises(TemplateError, match="int; expected semantic variables or strings"):
        upper(text, 3)  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match=r"name the session, as in upper\.on\(session\)"):
        upper("text")
    with pytest.raises(TemplateError, match="gets no text"):
        native_function(lambda: "x").on(session)()
    with pytest.raises(TypeError, match="missing a required argument"):
        upper()
    session.run()
