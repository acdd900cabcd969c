"""A session's log is replaced by a shorter one, and a replay of both makes the same session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import PlaitError
from plait.gateway.calls.annotations import Condition
from plait.gateway.durability import compaction, replay
from plait.gateway.durability.compaction import FLOOR_BYTES, GROWTH, compacted, replace, shortened, size_bytes
from plait.gateway.durability.outline import ended_calls
from plait.gateway.durability.replay import Replay
from plait.gateway.programs.held_call import HeldCall, KeptRequest, Output, with_condition
from plait.gateway.programs.record import SESSION, CallEnded, Recorded, Started, Submitted, ValueSet, decoded, encoded
from plait.gateway.programs.session import Session
from plait.gateway.programs.session_errors import FailureCause, failure_causes
from plait.gateway.store.event_log import Change, StoredStream, StoreError, StreamKey
from plait.policy.programs.request_graph_state import CallState
from plait.policy.types import Objective
from tests.gateway.durability.durable_gateway import DurableServed, durable, keeper_of
from tests.gateway.programs.chained_gateway import settle
from tests.gateway.programs.session_calls import Core, Owner

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
        self.core.executor.check()

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


def made_again(_runner: object, _session: Session, call_id: str, request: KeptRequest, _now_s: float) -> HeldCall:
    return call_of(call_id, msgspec.json.decode(request.body, type=CallBody))


def replayed(changes: Sequence[Change], monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session that a gateway makes of a log, whose calls have not begun."""
    events = [decoded(change) for change in changes]
    monkeypatch.setattr(replay, "made_again", made_again)
    core = Core(hold_timeout_s=30.0)
    runner = cast("Any", SimpleNamespace(executor=core.executor))
    session = core.executor.sessions.restore("t", "s", 0.0, 3600.0)
    session.touch(0.0)
    Replay(runner, session, asyncio.Event(), set(), 0.0).run(events, lambda _: None)
    core.settle(0.0)
    core.executor.check()
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


@given(st.randoms(use_true_random=False), st.integers(1, 60), st.integers(0, 40))
def test_a_compacted_log_makes_the_same_session(random: Random, steps: int, later: int) -> None:
    client = Client(random)
    for _ in range(steps):
        client.step()
    before = list(client.log.changes)
    short = list(compacted(before))
    for _ in range(later):
        client.step()
    rest = client.log.changes[len(before) :]
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert shown(replayed(short, monkeypatch)) == shown(replayed(before, monkeypatch))
        assert shown(replayed(short + rest, monkeypatch)) == shown(replayed(before + rest, monkeypatch))
    assert list(compacted(short)) == short
    assert short[-1].at_unix_s == before[-1].at_unix_s, "its time to live counts from its last event"
    assert not any(len(short[place].data or b"") > BODY_CHARACTERS for place in ended_calls(list(map(decoded, short))))


def without_skips(changes: Sequence[Change]) -> list[Change]:
    """The log as earlier gateways wrote it."""
    events = zip(changes, map(decoded, changes), strict=True)
    return [change for change, event in events if not (isinstance(event, CallEnded) and event.is_skip)]


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 40))
def test_a_log_without_its_skips_makes_the_same_session(seed: int, steps: int, later: int) -> None:
    client = Client(Random(seed))
    for _ in range(steps):
        client.step()
    before = list(client.log.changes)
    for _ in range(later):
        client.step()
    rest, live = client.log.changes[len(before) :], shown(client.session)
    with pytest.MonkeyPatch.context() as monkeypatch:
        first, last = shown(replayed(before, monkeypatch)), shown(replayed(before + rest, monkeypatch))
        assert all(last[what] == live[what] for what in ("values", "states", "causes"))
        for unsaid in (without_skips(before), list(compacted(without_skips(before)))):
            assert shown(replayed(unsaid, monkeypatch)) == first
            assert shown(replayed(unsaid + without_skips(rest), monkeypatch)) == last
            assert shown(replayed(unsaid + rest, monkeypatch)) == last, "this gateway goes on with it"


@pytest.mark.parametrize("call_id", ["b", "a"])
def test_a_call_whose_skip_was_not_written_gives_its_output_to_the_next(
    call_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(Random(0))
    executor, session = client.core.executor, client.session
    executor.add(session, call_of("a", CallBody(("x", "y"), ("v",), Condition("x", "==", "yes"))), 1.0)
    executor.variables.set_value(session, "x", "no", 2.0)
    client.core.settle(2.0)
    again = call_of(call_id, CallBody((), ("v",), None))
    executor.add(session, again, 3.0)
    executor.start(again, 3.0)
    executor.produce(again, "acknowledged", 3.0)
    executor.variables.set_failed(session, "y", FailureCause(message="it broke"), 4.0)
    unsaid = without_skips(client.log.changes)
    for changes in (unsaid, compacted(unsaid)):
        assert replayed(changes, monkeypatch).values == {"x": "no", "v": "acknowledged"}


def test_a_skip_is_written_while_the_gateway_hands_over() -> None:
    client = Client(Random(0))
    executor, session = client.core.executor, client.session
    producer = call_of("x", CallBody((), ("x",), None))
    executor.add(session, producer, 1.0)
    executor.add(session, call_of("a", CallBody(("x", "y"), ("v",), Condition("x", "==", "yes"))), 1.0)
    executor.start(producer, 1.0)
    client.log.is_over = True
    executor.produce(producer, "no", 2.0)
    assert [type(decoded(change)) for change in client.log.changes[-2:]] == [ValueSet, CallEnded]


def repeated(count: int) -> Client:
    """A call that fails, is repeated, and fails again."""
    client = Client(Random(0))
    for number in range(count):
        call = call_of("c", CallBody((), ("v0",), None))
        client.core.executor.add(client.session, call, float(number))
        client.core.executor.start(call, float(number))
        client.core.executor.fail(call, FailureCause(message="it is refused"), float(number))
    return client


def test_of_a_call_that_fails_in_a_loop_the_last_is_kept() -> None:
    short = compacted(repeated(50).log.changes)
    assert [type(decoded(change)).__name__ for change in short] == ["Opened", "Submitted", "CallEnded"]
    assert size_bytes(short) < 300


def test_the_last_event_is_kept_for_its_time() -> None:
    twice = Change(KEY, 99.0, encoded(CallEnded("c", "it was skipped", "cancelled")))
    assert compacted([*repeated(5).log.changes, twice])[-1].at_unix_s == 99.0


def test_a_call_that_has_not_ended_keeps_its_request_and_its_starts_for_the_output() -> None:
    client = Client(Random(0))
    call = call_of("c", CallBody((), ("v0", "v1"), None))
    client.core.executor.add(client.session, call, 0.0)
    client.core.executor.start(call, 0.0)
    for _ in range(3):
        client.core.executor.attempt(call, 0.0)
    client.core.executor.produce(call, "yes", 0.0)
    client.core.executor.attempt(call, 0.0)
    short = [decoded(change) for change in compacted(client.log.changes)]
    assert sum(isinstance(event, Started) for event in short) == 1
    (submitted,) = [event for event in short if isinstance(event, Submitted)]
    assert submitted.request.path == "/v1/submit"


class Kept:
    """A keeper of one stream."""

    def __init__(self, changes: Sequence[Change], problem: str | None = None) -> None:
        self.changes = list(changes)
        self.problem = problem

    def stream(self, key: StreamKey) -> StoredStream:
        return StoredStream(key, list(self.changes), self.problem)

    def write(self, changes: Sequence[Change], *, again: bool = False) -> None:  # noqa: ARG002 - it does not fail
        assert changes[0].data is None, "it is replaced"
        self.changes = list(changes[1:])


@pytest.mark.parametrize(("data", "problem"), [(b"nothing that was ever written", None), (None, "a bit was changed")])
def test_a_log_that_cannot_be_read_stays_as_it_is(data: bytes | None, problem: str | None) -> None:
    keeper = Kept([*repeated(5).log.changes, *([] if data is None else [Change(KEY, 9.0, data)])], problem)
    before = list(keeper.changes)
    assert shortened(keeper.stream(KEY)).events == before


def test_what_has_come_while_a_log_was_compacted_is_kept() -> None:
    changes = list(repeated(5).log.changes)
    keeper = Kept(changes[:-2])
    stream = keeper.stream(KEY)
    short = shortened(stream).events
    keeper.changes = changes
    assert replace(cast("Any", keeper), stream, short)
    assert keeper.changes == [*short, *changes[-2:]]


def test_a_log_that_has_begun_anew_meanwhile_stays_as_it_is() -> None:
    changes = list(repeated(5).log.changes)
    keeper = Kept(changes)
    stream = keeper.stream(KEY)
    keeper.changes = another = [change._replace(at_unix_s=9.0) for change in changes]
    assert not replace(cast("Any", keeper), stream, shortened(stream).events)
    assert keeper.changes == another


def test_a_log_of_very_many_events_stays_as_it_is() -> None:
    size = compaction.LogSize(GROWTH * FLOOR_BYTES, events=compaction.MOST_EVENTS)
    assert size.is_long
    size.appended(100)
    assert not size.is_long


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "plait.db"


USER = "u" * 30_000
"""A field of the body that no engine has to read."""


async def fail_in_a_loop(served: DurableServed, times: int) -> None:
    for number in range(times):
        chat = await served.chat("Write", output="out", user=USER)
        async with asyncio.timeout(10):
            while "Write" not in served.engine.running:  # noqa: ASYNC110 - the commits are a thread's
                await asyncio.sleep(0)
        await served.engine.refuse("Write")
        await asyncio.wait_for(chat.task, 10)
        assert chat.status == 400, number
        await settle()


async def test_a_call_that_fails_in_a_loop_leaves_a_bounded_log(path: Path) -> None:
    async with durable(path) as first:
        await fail_in_a_loop(first, 60)
        await first.stored()
        await asyncio.sleep(0.05)
        (stream,) = [keeper_of(first).stream(key) for key in keeper_of(first)._streams]
        assert size_bytes(stream.events) < (GROWTH + 1) * FLOOR_BYTES
    async with durable(path) as second:
        failed = await second.get("out")
        await second.stored()
        assert failed.status == 424
        await fail_in_a_loop(second, 1)


async def test_a_store_that_is_away_while_a_log_is_rewritten_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with durable(path) as first:
        keeper = keeper_of(first)
        read, problems = keeper.stream, [StoreError("away")]

        def failing(key: StreamKey) -> StoredStream:
            if problems:
                raise problems.pop()
            return read(key)

        monkeypatch.setattr(keeper, "stream", failing)
        await first.value("task", "a snake game")
        await fail_in_a_loop(first, 40)
        assert not problems
    async with durable(path) as second:
        got = await second.get("task")
        await second.stored()
        assert got.json["value"] == "a snake game"


async def test_commits_go_on_while_a_long_log_is_compacted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(changes: Sequence[Change]) -> Sequence[Change]:
        begun.set()
        assert may_go_on.wait(20)
        return compacted(changes)

    monkeypatch.setattr(compaction, "compacted", slow)
    async with durable(path) as first:
        await fail_in_a_loop(first, 12)
        assert await asyncio.to_thread(begun.wait, 10)
        await first.value("task", "a snake game")
        await asyncio.wait_for(first.stored(), 10)
        may_go_on.set()
        await fail_in_a_loop(first, 1)
        await first.stored()
    async with durable(path) as second:
        got = await second.get("task")
        await second.stored()
        assert got.json["value"] == "a snake game"
