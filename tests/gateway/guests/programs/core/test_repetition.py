"""What is sent again because its answer was lost has no effect, and is answered as the first time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import ConflictError
from plait.gateway.guests.programs.core.held_call import HeldCall, Output
from plait.gateway.guests.programs.core.session_errors import FailureCause, variable_failed
from plait.gateway.guests.programs.native_step import DeclaredStep, NativeSteps, new_step
from plait.gateway.guests.programs.program import Program, entry
from plait.policy.programs.request_graph_state import VariableState
from tests.gateway.guests.programs.core.session_calls import Core, Owner, Waiting, owner
from tests.invariants import check
from tests.pieces import at_once

VALUES = {"x": "some text", "y": ""}
POST, ERROR, PROGRAM, WHOLE = "a value", "an error", "a program with the value", "the whole program and the value"


@dataclass(frozen=True)
class Drawn:
    """A program. Each node takes its `inputs`. One with a way in `ways` is a native step, computed in that way."""

    inputs: list[list[str]]
    ways: dict[int, str]
    gets: list[str]


@st.composite
def programs(draw: st.DrawFn) -> Drawn:
    size = draw(st.integers(1, 7))
    sources = [[*(f"v{before}" for before in range(number)), *VALUES] for number in range(size)]
    inputs = [sorted(draw(st.sets(st.sampled_from(names), min_size=1, max_size=3))) for names in sources]
    ways = draw(st.dictionaries(st.integers(0, size - 1), st.sampled_from([POST, POST, ERROR, PROGRAM, WHOLE])))
    return Drawn(inputs, ways, draw(st.lists(st.sampled_from([f"v{number}" for number in range(size)]), unique=True)))


class Sent(NamedTuple):
    """A request that was sent, its answer, and whether it has the whole program in it."""

    request: Callable[[], Any]
    answer: Any
    is_whole: bool


@dataclass
class Sender:
    """Sends the requests of a program, once or more often. `gets` are those of each time that the program was sent."""

    drawn: Drawn
    core: Core = field(default_factory=Core)
    sent: list[Sent] = field(default_factory=list)
    calls: dict[int, HeldCall] = field(default_factory=dict)
    gets: list[list[Waiting]] = field(default_factory=list)

    def send(self, request: Callable[[], Any], *, is_whole: bool) -> None:
        self.sent.append(Sent(request, request(), is_whole))
        check(self.core.executor)

    def again(self, number: int) -> None:
        """Send an earlier request again. A program that comes again runs what has failed once more, so it does not."""
        sent = [one for one in self.sent if not (one.is_whole and self.has_failures)]
        if sent:
            request, answer, _ = sent[number % len(sent)]
            assert request() == answer
            check(self.core.executor)

    def program(self, **values: str) -> None:
        """Send the whole program, with further values."""
        nodes = {number: self._node(number) for number in range(len(self.drawn.inputs))}
        self.calls = self.calls or nodes
        gets = [Waiting(name) for name in self.drawn.gets]
        self.gets.append(gets)
        places = {f"calls[{number}]": call for number, call in nodes.items()}
        self._enter(Program(VALUES | values, places, [got.getter for got in gets]))
        repeated = [owner(call) for call in nodes.values() if call not in self.calls.values() and not call.is_native]
        assert not any(one.ready or one.error for one in repeated)

    def compute(self, number: int) -> None:
        """Send what the client computes for a native step, or that it could not."""
        name, value, way = f"v{number}", f"computed {number}", self.drawn.ways[number]
        natives, is_whole = NativeSteps(self.core.executor), way == WHOLE and not self.has_failures

        def request() -> tuple[Any, ...]:
            if is_whole:
                self.program(**{name: value})
            elif way == ERROR:
                natives.set_failed(self.core.session(), name, FailureCause(message=value), 0.0)
            elif way == POST:
                natives.set_value(self.core.session(), name, value, 0.0)
            else:
                self._enter(Program({name: value}, {}))
            return self.state(name)

        self.send(request, is_whole=is_whole)

    def state(self, name: str) -> tuple[Any, ...]:
        """A variable as clients see it."""
        session = self.core.session()
        cause = session.graph.cause(name)
        error = None if cause is None else variable_failed(name, cause).body()
        return session.state_of(name), session.values.get(name), error

    def go_on(self) -> bool:
        """Run a ready call, or compute a native step whose inputs have values; False if there is none."""
        left = self.core.session().calls.values()
        ready = [number for number, call in self.calls.items() if call in left and call.ready_s is not None]
        if not ready:
            return False
        if ready[0] in self.drawn.ways:
            self.compute(ready[0])
        else:
            self.core.run(self.calls[ready[0]], f"text {ready[0]}")
        return True

    @property
    def has_failures(self) -> bool:
        return any(self.core.session().state_of(f"v{number}") is VariableState.FAILED for number in self.calls)

    def outcome(self) -> Any:
        """All that clients and engines were told so far."""
        told = [[one if isinstance(one, str) else one.body() for one in got.told] for got in self.gets[0]]
        ready = [owner(call).ready for call in self.calls.values() if not call.is_native]
        variables = self.core.executor.variables
        states = [self.state(name) for name in (*VALUES, *(f"v{number}" for number in self.calls))]
        return states, told, ready, variables.counts["set"], variables.counts["failed"], list(self.core.session().calls)

    def _enter(self, program: Program) -> None:
        at_once(entry(self.core.executor, self.core.session(), program, 0.0))

    def _node(self, number: int) -> HeldCall:
        name, inputs, session = f"v{number}", self.drawn.inputs[number], self.core.session()
        if number in self.drawn.ways:
            return new_step(self.core.executor, session, DeclaredStep(name, inputs), f"N{number}")
        call_id = session.unused_id(f"C{number}")
        return HeldCall(call_id, tuple(inputs), (Output(name),), Owner(), fingerprint=name.encode())


@given(drawn=programs(), data=st.data())
def test_a_session_in_which_requests_come_again_is_like_one_in_which_they_do_not(
    drawn: Drawn, data: st.DataObject
) -> None:
    once, often = Sender(drawn), Sender(drawn)
    for sender in (once, often):
        sender.send(sender.program, is_whole=True)
    while once.go_on():
        assert often.go_on()
        for number in data.draw(st.lists(st.integers(0, 10), max_size=3)):
            often.again(number)
        assert often.outcome() == once.outcome()
    assert not often.go_on()
    for number, first in enumerate(often.gets[0]):
        assert all(str(gets[number].told) == str(first.told) for gets in often.gets)


def test_a_closed_session_still_answers_a_value_that_it_has() -> None:
    core = Core()
    session, natives = core.session(), NativeSteps(core.executor)
    natives.declare(session, DeclaredStep("parsed", ["code"]), "step", 0.0)
    for name in ("code", "parsed"):
        natives.set_value(session, name, "1", 0.0)
    core.executor.endings.close(session, 1.0)
    for name in ("code", "parsed"):
        natives.set_value(session, name, "1", 2.0)
        with pytest.raises(ConflictError):
            natives.set_value(session, name, "2", 2.0)


def test_the_text_of_a_call_is_not_a_value_that_a_client_has_set() -> None:
    core = Core()
    core.run(core.add("A", outputs=["a"]), "text")
    with pytest.raises(ConflictError) as caught:
        NativeSteps(core.executor).set_value(core.session(), "a", "text", 1.0)
    assert caught.value.code == "double_producer"


def test_an_error_that_comes_again_after_the_variable_was_produced_is_refused() -> None:
    core, what = Core(), FailureCause(message="no")
    natives = NativeSteps(core.executor)
    for _ in range(2):
        natives.set_failed(core.session(), "a", what, 0.0)
    assert core.executor.variables.counts["failed"] == 1
    natives.set_value(core.session(), "a", "1", 1.0)
    with pytest.raises(ConflictError):
        natives.set_failed(core.session(), "a", what, 2.0)
