"""Which steps become ready when, against an oracle; and when a watch asks again."""

from __future__ import annotations

import random

import msgspec
import pytest

from plait.client.collected import Collected
from plait.client.delivery import Delivery
from plait.client.errors import AnswerError, ClientError, ConnectionFailedError
from plait.client.flow import Retries
from plait.client.native import Native
from plait.client.native_steps import InputWatch, NativeStep


def delivery() -> Delivery:
    return Delivery({"session": "s"}, Collected(), Retries(most=2, first_pause_s=0.5))


def step(to: Delivery, output: str, *inputs: str) -> NativeStep:
    native = Native(output, str)
    entry = to.collected.call(output, native.body(inputs, output), inputs, [output], "natives")
    assert entry is not None
    return NativeStep(native, {}, inputs, output, entry)


def line(name: str, value: str | None = None, code: str | None = None) -> str:
    error = None if code is None else {"message": "no", "code": code}
    return f"data: {msgspec.json.encode({'name': name, 'value': value, 'error': error}).decode()}"


@pytest.mark.parametrize("seed", range(60))
def test_a_step_runs_once_if_all_inputs_come_and_never_if_one_fails(seed: int) -> None:
    """Streams time out, break off and begin again; a value comes once."""
    dice = random.Random(seed)
    to = delivery()
    inputs = [f"i{number}" for number in range(dice.randrange(1, 8))]
    steps = [step(to, f"o{number}", *dice.sample(inputs, dice.randrange(1, len(inputs) + 1))) for number in range(6)]

    def is_possible(one: NativeStep) -> bool:
        return all(fate[name] == "value" for name in one.inputs)

    given_back: list[NativeStep] = []
    watch = InputWatch(steps, to, given_back.extend)
    fate = {name: dice.choice(["value", "value", "value", "variable_failed", "skipped"]) for name in inputs}
    told: set[str] = set()
    ran: list[NativeStep] = []
    while watch._open:
        body = msgspec.json.decode(msgspec.json.encode(watch.request().body))
        gets = list(body["gets"])
        waiting = [one for one in steps if not told.issuperset(one.inputs) and is_possible(one)]
        assert {one.output for one in waiting} <= {native["output"] for native in body["natives"]}
        assert {name for one in waiting for name in one.inputs} <= set(body["external"])
        assert told.isdisjoint(name for name in gets if fate[name] == "value")
        for name in dice.sample(gets, len(gets)):
            match dice.choice(["told", "told", "delta", "late", "broken"]):
                case "told":
                    told.add(name)
                    news = line(name, "x") if fate[name] == "value" else line(name, code=fate[name])
                    ran += [job.step for job in watch.feed(news) or watch.last]
                case "delta":
                    assert watch.feed(f'data: {{"name": "{name}", "delta": "x"}}') == []
                case "late":
                    assert watch.feed(line(name, code="get_timeout")) == []
                case _:
                    break
            for one in steps:
                assert ran.count(one) == (told.issuperset(one.inputs) and is_possible(one))
        if watch.pause_after(None) is None:
            break
    assert not set(given_back).intersection(ran)
    lost = [one for one in steps if any(fate[name] != "value" and name in told for name in one.inputs)]
    assert all(one.entry.settled for one in lost), "they are not sent again"
    assert not any(one.entry.settled for one in ran), "their values are not set yet"


@pytest.mark.parametrize(
    ("error", "pauses_s"),
    [
        (None, [0.5, 1.0, 2.0, None]),
        (ConnectionFailedError("gone"), [0.5, 1.0, 2.0, None]),
        (AnswerError("stopping", status=503), [0.5, 1.0, 2.0, None]),
        (AnswerError("an event of the stream"), [0.5, 1.0, 2.0, None]),
        (AnswerError("deleted", status=410), [None]),
        (AnswerError("a cycle", status=409), [None]),
    ],
)
def test_a_watch_asks_again_unless_it_is_refused(error: ClientError | None, pauses_s: list[float | None]) -> None:
    to, given_back = delivery(), list[NativeStep]()
    waiting = step(to, "o", "i")
    watch = InputWatch([waiting], to, given_back.extend)
    assert [watch.pause_after(error) for _ in pauses_s] == pauses_s
    assert given_back == [waiting]
    assert not watch._open


def test_news_show_that_the_gateway_answers() -> None:
    to = delivery()
    watch = InputWatch([step(to, "o", "i", "j")], to, list[NativeStep]().extend)
    assert [watch.pause_after(None), watch.pause_after(None)] == [0.5, 1.0]
    assert watch.feed(line("i", "x")) == []
    assert watch.feed(": waiting") == []
    assert watch.pause_after(None) == 0.5
    assert watch.feed(line("j", "y")) == []
    assert [job.step.output for job in watch.last] == ["o"], "for the end of the stream"
    assert watch.pause_after(None) is None
