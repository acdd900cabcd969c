"""What was collected and how it leaves: against an oracle that knows what a gateway has."""

from __future__ import annotations

import random

import msgspec
import pytest

from plait.client.collected import Batch, Collected
from plait.client.errors import AnswerError, ClientError, VariableFailedError


def variables(batch: Batch) -> set[str]:
    """What the entries of a batch produce."""
    return {name for entry in batch.entries for name in entry.outputs}


class Gateway:
    """Takes batches in any order, if each input of a call is known to it or comes with the call."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}  # variable -> how often it came

    def take(self, batch: Batch) -> None:
        known = self.taken.keys() | variables(batch)
        for entry in batch.entries:
            assert known.issuperset(entry.inputs), f"{entry.what} came before what it takes"
        for name in variables(batch):
            self.taken[name] = self.taken.get(name, 0) + 1


@pytest.mark.parametrize("seed", range(60))
def test_whatever_overtakes_or_is_lost_a_gateway_gets_all_before_it_needs_it(seed: int) -> None:
    """Programs are made, sent, answered and lost in any order, and so are requests that are under way at once."""
    dice = random.Random(seed)
    collected, gateway = Collected(), Gateway()
    made: list[str] = []
    under_way: list[tuple[Batch, list[str]]] = []
    for step in range(120):
        match dice.choice(["value", "call", "call", "send", "arrive", "lose"]):
            case "value":
                made.append(f"v{step}")
                collected.set_value(made[-1], "x")
            case "call":
                taken = dice.sample(made, min(len(made), dice.randrange(4)))
                made.append(f"c{step}")
                collected.call("f", {}, taken, [made[-1]])
            case "send" if made:
                gets = dice.sample(made, dice.randrange(min(len(made), 3)))
                (batch,) = collected.batches(gets)
                under_way.append((batch, gets))
                assert collected.unsent() == []
            case "arrive" if under_way:
                batch, gets = under_way.pop(dice.randrange(len(under_way)))
                gateway.take(batch)
                assert gateway.taken.keys() >= set(gets)
                with batch.sent():
                    if dice.random() < 0.7:  # otherwise the answer is lost
                        batch.accept()
            case "lose" if under_way:
                batch, _ = under_way.pop(dice.randrange(len(under_way)))
                with batch.sent():
                    pass
    for batch, _ in under_way:
        gateway.take(batch)
        with batch.sent():
            batch.accept()
    (rest,) = collected.batches(made)
    gateway.take(rest)
    with rest.sent():
        rest.accept()
    assert gateway.taken.keys() == set(made), "all has arrived"
    assert [batch.entries for batch in collected.batches(made)] == [()], "and nothing is sent again"


@pytest.mark.parametrize("seed", range(40))
def test_a_refusal_takes_what_needs_the_refused_call_and_nothing_else(seed: int) -> None:
    dice = random.Random(seed)
    collected = Collected()
    needs: dict[str, set[str]] = {}
    for number in range(dice.randrange(1, 20)):
        taken = dice.sample(sorted(needs), min(len(needs), dice.randrange(3)))
        needs[f"c{number}"] = set(taken).union(*(needs[name] for name in taken))
        collected.call(f"f{number}", {}, taken, [f"c{number}"])
    (batch,) = collected.batches()
    at_fault = dice.randrange(len(needs))
    error = AnswerError("no", status=400, param=f"calls[{at_fault}].placeholders")
    with pytest.raises(AnswerError, match=f"^f{at_fault}: no"), batch.sent():
        raise error
    for name, upstream in needs.items():
        refusal = collected.refusal(name)
        if name == f"c{at_fault}":
            assert refusal is error
        elif f"c{at_fault}" in upstream:
            assert isinstance(refusal, VariableFailedError)
        else:
            assert refusal is None
    (again,) = collected.batches()
    assert variables(again) == {name for name in needs if collected.refusal(name) is None}


def test_a_call_that_needs_what_was_refused_is_not_sent() -> None:
    collected = Collected()
    collected.set_value("v", "x")
    (batch,) = collected.batches()
    with pytest.raises(AnswerError), batch.sent():
        raise AnswerError("no", status=413, param="values.v")
    collected.call("f", {}, ["v"], ["c"])
    assert collected.unsent() == []
    with pytest.raises(VariableFailedError, match="variable v was refused"):
        collected.check("c")


def test_a_refusal_of_a_get_or_for_now_loses_nothing() -> None:
    collected = Collected()
    collected.call("f", {}, [], ["c"])
    for error in (
        AnswerError("no", status=400, param="gets.other"),
        AnswerError("busy", status=429),
        AnswerError("who?", status=401),
        AnswerError("over", status=410),
    ):
        (batch,) = collected.batches()
        with pytest.raises(AnswerError), batch.sent():
            raise error
    (batch,) = collected.batches()
    assert variables(batch) == {"c"}


def test_a_batch_has_its_values_calls_and_what_others_produce() -> None:
    collected = Collected()
    collected.expect("theirs")
    name = collected.literal("text")
    assert collected.literal("text") == name
    collected.call("f", {"model": "m"}, [name, "theirs"], ["c"])
    (batch,) = collected.batches(["c"])
    body = msgspec.json.decode(msgspec.json.encode(batch.body()))
    assert body == {"values": {name: "text"}, "calls": [{"model": "m"}], "external": ["theirs"]}
    with pytest.raises(ClientError, match="c has a value already"):
        collected.set_value("c", "x")
