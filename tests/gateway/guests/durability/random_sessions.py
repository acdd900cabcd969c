"""Sessions that clients make at random, their logs, and what a replay makes of these."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from plait.backends.errors import PlaitError
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.condition import Condition
from plait.gateway.guests.durability.recorded import Recorded, decoded
from plait.gateway.guests.durability.replay import AGAIN, Replay
from plait.gateway.guests.programs.core.held_call import HeldCall, KeptRequest, Output, with_condition
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.core.session_errors import FailureCause, failure_causes
from plait.gateway.streams import SESSION, Change, StreamKey
from plait.policy.programs.request_graph_state import CallState
from plait.policy.types import Objective
from tests.gateway.guests.programs.core.session_calls import Core, Owner
from tests.invariants import check

KEY = StreamKey(SESSION, "t", "s")
VARIABLES = [f"v{number}" for number in range(6)]
BODY_CHARACTERS = 2_000


class EventList:
    """A log in memory."""

    problem = None
    is_over = False

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def append(self, changes: Sequence[Change]) -> None:
        self.changes += [change for change in changes if change.data is not None]

    async def committed(self, _stream: StreamKey) -> bool:
        return True


class CallBody(msgspec.Struct):
    """What a call is made from again."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    when: Condition | None
    text: str = "x" * BODY_CHARACTERS


def call_of(call_id: str, body: CallBody) -> HeldCall:
    kept = KeptRequest("submission", "/v1/submit", (), msgspec.json.encode(body))
    outputs = tuple(map(Output, body.outputs))
    return HeldCall(
        call_id, with_condition(body.inputs, body.when), outputs, Owner(), when=body.when,
        fingerprint=call_id.encode(), request=lambda: kept,
    )  # fmt: skip


class Client:
    """Does to a session what clients, owners and time do, in any order. What is refused changes nothing."""

    def __init__(self, random: Random) -> None:
        self.log = EventList()
        self.core = Core(hold_timeout_s=30.0)
        self.session = self.core.executor.sessions.restore("t", "s", 0.0, 3600.0)
        self.session.touch(0.0)
        self.session.record_in(Recorded(self.log, KEY, 0.0))
        self.session.record.opened(3600.0, 0.0)
        self._random = random
        self._now_s = 0.0

    def step(self) -> None:
        self._now_s += 1.0
        does = [self._submit] * 6 + [self._run] * 4 + [self._fail] * 4
        does += [
            self._cancel,
            self._set,
            self._set,
            self._set,
            self._set_failed,
            self._prefer,
            self._keep,
            self._expire,
        ]
        with suppress(PlaitError):
            self._random.choice([*does, *[self._close] * (self._now_s > 20)])()
        self.core.settle(self._now_s)
        check(self.core.executor)

    def _names(self, most: int) -> tuple[str, ...]:
        return tuple(self._random.sample(VARIABLES, self._random.randint(1, most)))

    def _call(self, *states: CallState) -> HeldCall | None:
        able = [call for call in self.session.calls.values() if self.session.graph.call_state(call.call_id) in states]
        return self._random.choice(able) if able else None

    def _submit(self) -> None:
        inputs = self._names(2) if self._random.random() < 0.7 else ()
        when = Condition(self._names(1)[0], "==", "yes") if self._random.random() < 0.6 else None
        outputs = tuple(name for name in self._names(2) if name not in inputs)
        if outputs:
            call = call_of(self.session.unused_id("c"), CallBody(inputs, outputs, when))
            self.core.executor.add(self.session, call, self._now_s)

    def _run(self) -> None:
        call = self._call(CallState.READY, CallState.RUNNING)
        if call is not None:
            if self.session.graph.call_state(call.call_id) is CallState.READY:
                self.core.executor.start(call, self._now_s)
            self.core.executor.attempt(call, self._now_s)
            if self._random.random() < 0.6:
                self.core.executor.produce(call, self._random.choice(["yes", "no"]), self._now_s)

    def _fail(self) -> None:
        call = self._call(CallState.WAITING, CallState.READY, CallState.RUNNING)
        if call is not None:
            self.core.executor.fail(call, FailureCause(message=f"at {self._now_s}"), self._now_s)

    def _cancel(self) -> None:
        call = self._call(CallState.WAITING, CallState.READY, CallState.RUNNING)
        if call is not None:
            self.core.executor.cancel(call, self._now_s)

    def _set(self) -> None:
        self.core.executor.variables.set_value(
            self.session, self._names(1)[0], self._random.choice(["yes", "no"]), self._now_s
        )

    def _set_failed(self) -> None:
        what = FailureCause(message=f"at {self._now_s}")
        self.core.executor.variables.set_failed(self.session, self._names(1)[0], what, self._now_s)

    def _prefer(self) -> None:
        self.core.executor.prefer(self.session, self._random.choice([*Objective]), self._now_s)

    def _keep(self) -> None:
        self.session.live_for(3600.0 + self._now_s)
        self.session.record.touched(1.0, self._now_s)

    def _expire(self) -> None:
        self.core.executor.endings.expire(self._now_s)

    def _close(self) -> None:
        if not self.session.closed:
            self.core.executor.endings.close(self.session, self._now_s)


def made_again(_runner: object, _session: Session, incoming: Incoming) -> HeldCall:
    return call_of(incoming.request_id, msgspec.json.decode(incoming.body, type=CallBody))


def replayed(changes: Sequence[Change], monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session that a gateway makes of a log, whose calls have not begun."""
    events = [decoded(change) for change in changes]
    core = Core(hold_timeout_s=30.0)
    runner = cast("Any", SimpleNamespace(executor=core.executor))
    session = core.executor.sessions.restore("t", "s", 0.0, 3600.0)
    session.touch(0.0)
    Replay(runner, {**AGAIN, "submission": made_again}, session, asyncio.Event(), set(), 0.0).run(
        events, lambda _: None
    )
    core.settle(0.0)
    check(core.executor)
    return session


def shown(session: Session) -> dict[str, Any]:
    """All that a client of the session, or its next call, could notice."""
    graph = session.graph
    return {
        "values": session.values,
        "outputs": {
            name: None if call is None else (call.call_id, call.fingerprint) for name, call in session.outputs.items()
        },
        "order": list(session.outputs),
        "states": {name: session.state_of(name) for name in graph.variables},
        "causes": {
            name: failure_causes(node.cause, name) for name, node in graph.variables.items() if node.cause is not None
        },
        "calls": {
            call_id: (
                call.inputs, call.variables, call.produced, call.attempts, call.when, call.held_bytes,
                graph.call_state(call_id), session.deductions.of(call_id),
            )
            for call_id, call in session.calls.items()
        },
        "made": {name: made.was_cut for name, made in session.made.items()},
        "session": (session.closed, session.objective, session.ttl_s, session.held_bytes),
    }  # fmt: skip
