"""Programs of semantic functions against a real gateway and its engines: workflows, failures, streams."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest

from e2e.server_process import NO_TLS, eventually
from e2e.servers import Fleet
from examples.software_team import FILES, write_software
from examples.summaries import in_a_chain, in_parallel, summaries
from plait.client import (
    AnswerError,
    Client,
    GetTimeoutError,
    Output,
    SemanticVariable,
    Session,
    SkippedError,
    Slo,
    Text,
    VariableFailedError,
    native_function,
    semantic_function,
)
from tests.waiting import WITHIN_S

ROOT = Path(__file__).parents[1]
EMULATED = "This is emulated text."


@semantic_function(max_tokens=20)
def go_on(text: Text) -> SemanticVariable:
    """Go on: {{text}} {{more}}"""
    raise NotImplementedError


@semantic_function(max_tokens=20)
def compare(left: Text, right: Text) -> SemanticVariable:
    """Compare {{left}} with {{right}}: {{result}}"""
    raise NotImplementedError


@semantic_function(max_tokens=20)
def as_json(text: Text) -> Annotated[SemanticVariable, Output("answer", transforms="json")]:
    """As JSON, which emulated text is not: {{text}} {{answer}}"""
    raise NotImplementedError


@semantic_function(max_tokens=30)
def answer_twice(
    question: Text,
) -> tuple[
    Annotated[SemanticVariable, Output("first", transforms='template("<{{value}}>")', max_tokens=6)],
    Annotated[SemanticVariable, Output("second", max_tokens=12)],
]:
    """Question: {{question}} In short: {{first}} At length: {{second}} Thank you."""
    raise NotImplementedError


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with Client(f"{fleet.gateway.url}/v1", model="demo", tls=NO_TLS) as client:
        yield client


@pytest.fixture
async def async_client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(f"{fleet.gateway.url}/v1", model="demo", tls=NO_TLS) as client:
        yield client


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session() as session:
        yield session


def state_of(fleet: Fleet, session: Session) -> httpx.Response:
    return fleet.gateway.get(f"/v1/sessions/{session.id}")


def test_a_team_of_engineers_is_25_calls(fleet: Fleet, client: Client) -> None:
    with client.session() as session:
        files = write_software(session, "a snake game")
        assert state_of(fleet, session).status_code == 404, "nothing was sent"
        session.run()
        variables = state_of(fleet, session).json()["variables"]
        assert sum(variable["producer"] != "client" for variable in variables) == 1 + 4 * len(FILES) == 25
        texts = [code.get("latency") for code in files.values()]
        assert all(text.startswith(EMULATED) for text in texts)
    assert state_of(fleet, session).status_code == 410


def test_what_a_chain_generates_is_in_the_prompt_of_the_next_call(session: Session) -> None:
    """The value travels inside the gateway: the same prompt, put together here, has the same answer."""
    first = go_on.on(session)("once")
    second = go_on(first)
    text = first.get()
    assert second.get() == go_on.on(session)(text).get()


def test_summaries_in_a_chain_and_by_map_reduce(session: Session) -> None:
    parts = [f"This is part {n}." for n in range(6)]
    assert in_a_chain(session, parts).get("latency").startswith(EMULATED)
    assert in_parallel(session, parts).get("throughput").startswith(EMULATED)


def test_a_diamond(session: Session) -> None:
    top = go_on.on(session)("the top")
    assert compare(go_on(top), go_on(top)).get(Slo(jct_s=5.0)).startswith(EMULATED)


def test_several_outputs_are_generated_in_turn(session: Session) -> None:
    first, second = answer_twice.on(session)("Why?")
    assert first.get().startswith("<")
    assert first.get().endswith(">")
    assert second.get()


def test_a_branch_that_fails_says_why_and_leaves_the_other_alone(fleet: Fleet, session: Session) -> None:
    good = go_on.on(session)("well")
    bad = as_json(good)
    middle = go_on(bad)
    last = compare(middle, good)
    with pytest.raises(VariableFailedError) as caught:
        last.get()
    *between, root = caught.value.causes
    assert (root.transform, root.variable, root.engine in fleet.engines) == ("json", bad.name, True)
    assert [cause.variable for cause in between] == [last.name, middle.name], "compare, go_on, as_json"
    assert go_on(good).get()


def test_a_value_that_comes_late_can_be_got_again(session: Session) -> None:
    later = session.variable(name="later")
    more = go_on(later)
    with pytest.raises(GetTimeoutError):
        more.get(timeout_s=0.01)
    session.variable("now", name="later")
    assert more.get().startswith(EMULATED)
    assert later.get() == "now"


def test_what_is_wrong_with_a_call_is_said_where_the_program_is_sent(session: Session) -> None:
    @semantic_function(model="nowhere")
    def nobody(text: Text) -> SemanticVariable:
        """{{text}} {{out}}"""
        raise NotImplementedError

    @semantic_function()
    def mistyped(text: Text) -> Annotated[SemanticVariable, Output("out", transforms="jsn")]:
        """{{text}} {{out}}"""
        raise NotImplementedError

    good = go_on.on(session)("well")
    other = nobody.on(session)("x")
    with pytest.raises(AnswerError, match=r"^nobody: calls\[1\] .*nowhere"):
        good.get()
    with pytest.raises(AnswerError, match="nowhere"):
        other.get()
    assert good.get().startswith(EMULATED), "it was not at fault"
    wrong = mistyped(good)
    with pytest.raises(AnswerError, match="did you mean json") as caught:
        go_on(wrong).get()
    found = caught.value
    assert (found.status, found.code, found.function) == (400, "invalid_transform", "mistyped")
    with pytest.raises(VariableFailedError, match="mistyped was refused"):
        go_on(wrong).get()
    session.variable("mine", name="taken")
    session.run()
    session.variable("yours", name="taken")
    with pytest.raises(AnswerError, match=r"^variable taken: .*409"):
        session.run()


async def test_a_value_is_streamed_while_it_is_generated(async_client: Client, session: Session) -> None:
    streamed = go_on.on(session)("tell me")
    pieces = list(streamed.stream("latency"))
    assert len(pieces) > 1
    assert "".join(pieces) == streamed.get()
    assert list(session.variable(name=streamed.name).stream()) == [streamed.get()], "it is there as a whole now"
    async with async_client.session() as other:
        pieces = [piece async for piece in go_on(go_on.on(other)("tell me")).astream()]
        assert len(pieces) > 1
        with pytest.raises(VariableFailedError):
            _ = [piece async for piece in as_json.on(other)("x").astream()]


async def test_a_program_in_an_event_loop(async_client: Client) -> None:
    text = " ".join(f"Sentence number {n}." for n in range(400))
    results = await asyncio.gather(*(summaries(async_client, text) for _ in range(3)))
    assert all(text.startswith(EMULATED) for pair in results for text in pair)


async def test_a_program_that_is_too_large_is_refused_as_a_whole(async_client: Client) -> None:
    async with async_client.session() as session:
        last = go_on(go_on(session.variable("x" * 2_000_000)))
        for _ in range(2):
            with pytest.raises(AnswerError) as caught:
                await last.aget()
            assert caught.value.code in ("value_too_large", "body_too_large")
        assert await go_on.on(session)("something shorter").aget()


async def test_functions_of_several_calls_in_one_trip(client: Client, async_client: Client) -> None:
    def program(texts: list[str]) -> list[SemanticVariable]:
        return [compare(go_on(text), text) for text in texts]

    values = client.run(program, ["one", "two"], objective="latency")
    assert [text.startswith(EMULATED) for text in values] == [True, True]
    assert await async_client.arun(program, ["one", "two"]) == values


async def test_tasks_get_their_values_as_they_come(async_client: Client) -> None:
    async with async_client.session() as session:
        chain = [go_on.on(session)("on and on")]
        for _ in range(3):
            chain.append(go_on(chain[-1]))
        arrived: list[int] = []

        async def get(number: int) -> None:
            await chain[number].aget()
            arrived.append(number)

        await asyncio.gather(*(get(number) for number in (3, 1, 0, 2)))
        assert arrived == [0, 1, 2, 3]


def test_one_side_is_taken_and_the_other_is_skipped(session: Session) -> None:
    draft = go_on.on(session)("a draft")
    taken = go_on.when(draft.contains("emulated"))("taken")
    skipped = go_on.when(draft.equals("no"))("skipped")
    after = go_on(skipped)
    with pytest.raises(SkippedError, match=r'was skipped: .* more_\w+ == "no" does not hold'):
        session.run(skipped, taken, objective="latency")
    assert taken.value is not None
    assert taken.value.startswith(EMULATED)
    with pytest.raises(SkippedError) as caught:
        after.get()
    assert [cause.variable for cause in caught.value.causes] == [after.name, skipped.name]
    with pytest.raises(SkippedError):
        list(skipped.stream())


@native_function
def shorten(text: str, words: str = "2") -> str:
    return " ".join(text.split()[: int(words)])


@native_function(seconds=0.01)
async def join(parts: list[str]) -> str:
    await asyncio.sleep(0.01)
    return "; ".join(parts)


@native_function
def parse(text: str) -> str:
    raise ValueError(f"not a number: {text[:4]}")


def calls_of(fleet: Fleet, session: Session, *variables: SemanticVariable) -> list[dict[str, Any]]:
    """What the gateway logged of the calls that produce these variables."""
    known = {one["semantic_var_id"]: one["producer"] for one in state_of(fleet, session).json()["variables"]}
    lines = [json.loads(line) for line in fleet.gateway.log().splitlines() if '"event":"call"' in line]
    return [line for name in variables for line in lines if line["request_id"] == known[name.name]]


def test_a_function_of_ones_own_runs_between_two_calls(fleet: Fleet, session: Session) -> None:
    draft = go_on.on(session)("a draft")
    short = shorten(draft, words="3")
    after = go_on(short)
    assert after.get("latency").startswith(EMULATED)
    assert short.get() == "This is emulated"
    assert after.get() == go_on.on(session)("This is emulated").get(), "it was in the prompt"
    calls = calls_of(fleet, session, draft, after)
    assert [call["objective"] for call in calls] == ["latency", "latency"], "deduced through the step"


def test_the_watch_of_a_step_may_overtake_its_program(fleet: Fleet, session: Session) -> None:
    draft = go_on.on(session)("another draft")
    short = shorten(draft)
    after = go_on(short)
    session._natives.start()
    eventually(lambda: state_of(fleet, session).status_code == 200)
    known = {one["semantic_var_id"]: one["state"] for one in state_of(fleet, session).json()["variables"]}
    assert known == {draft.name: "empty", short.name: "pending"}
    assert after.get("latency").startswith(EMULATED)
    assert [call["objective"] for call in calls_of(fleet, session, draft, after)] == ["latency", "latency"]


def test_native_functions_take_several_texts_and_each_other(session: Session) -> None:
    parts = [shorten(go_on.on(session)(text)) for text in ("one", "two", "three")]
    whole = shorten(join([*parts, "and that"]), "4")
    more = go_on(whole)
    assert session.run(whole, more) == ("This is; This is;", more.get())
    assert shorten.on(session)("a known text").get() == "a known"
    assert shorten(more).get() == "This is", "its input is there already"


async def test_native_functions_in_an_event_loop(client: Client, async_client: Client) -> None:
    def program(texts: list[str]) -> SemanticVariable:
        return go_on(join([shorten(go_on(text)) for text in texts]))

    texts = [f"part {number}" for number in range(20)]
    value = await async_client.arun(program, texts, objective="latency")
    assert value.startswith(EMULATED)
    assert await asyncio.to_thread(client.run, program, texts) == value
    async with async_client.session() as session:

        async def one(text: str) -> str:
            return await shorten(go_on.on(session)(text)).aget()

        assert await asyncio.gather(*map(one, texts)) == ["This is"] * 20
        streamed = go_on(shorten(go_on.on(session)("x")))
        assert "".join([piece async for piece in streamed.astream()]).startswith(EMULATED)


def test_a_native_function_that_fails_says_why(fleet: Fleet, session: Session) -> None:
    draft = go_on.on(session)("a draft")
    number = parse(draft)
    last = go_on(shorten(number))
    with pytest.raises(VariableFailedError, match="parse raised ValueError: not a number: This") as caught:
        last.get()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.causes[-1].variable == number.name
    assert draft.get().startswith(EMULATED)
    too_large = native_function(lambda text: text * 100_000)(draft)
    with pytest.raises(VariableFailedError, match="the result of <lambda> was refused: The request body is too large"):
        go_on(too_large).get()


def test_a_step_behind_what_fails_or_is_skipped_never_runs(session: Session) -> None:
    ran: list[str] = []

    @native_function
    def never(text: str) -> str:
        ran.append(text)
        return text

    draft = go_on.on(session)("a draft")
    failed, skipped = never(as_json(draft)), never(go_on.when(draft.equals("no"))("x"))
    with pytest.raises(VariableFailedError, match="json"):
        go_on(failed).get()
    with pytest.raises(SkippedError):
        go_on(skipped).get()
    taken = go_on.when(shorten(draft).equals("This is"))("the text of a function decides")
    assert taken.get().startswith(EMULATED)
    assert ran == []


@pytest.mark.parametrize(
    "example", [["software_team.py"], ["checked_code.py"], ["summaries.py", "README.md"]], ids=lambda line: line[0]
)
def test_the_examples_run(fleet: Fleet, example: list[str]) -> None:
    name, *more = example
    command = [sys.executable, f"examples/{name}", f"--base-url={fleet.gateway.url}/v1", "--model=demo", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    assert EMULATED in done.stdout
