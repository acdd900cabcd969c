"""A session's log is replaced by a shorter one, and a replay of both makes the same session."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait.gateway.calls.condition import Condition
from plait.gateway.guests.durability import compaction
from plait.gateway.guests.durability.compaction import FLOOR_BYTES, GROWTH, compacted, replace, shortened, size_bytes
from plait.gateway.guests.durability.ended_calls import ended_calls
from plait.gateway.guests.durability.recorded import decoded
from plait.gateway.guests.programs.chained_calls import once_answered
from plait.gateway.guests.programs.core.held_call import KeptRequest
from plait.gateway.guests.programs.core.record import CallEnded, Submitted, ValueSet
from plait.gateway.guests.programs.core.session_errors import FailureCause
from plait.gateway.guests.store.event_log import StoreError
from plait.gateway.streams import Change, StoredStream, StreamKey
from tests.gateway.guests.durability.durable_gateway import DurableServed, durable, keeper_of
from tests.gateway.guests.durability.random_sessions import (
    BODY_CHARACTERS,
    KEY,
    CallBody,
    Client,
    call_of,
    replayed,
    shown,
)
from tests.gateway.guests.programs.chained_gateway import settle
from tests.waiting import WITHIN_S


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
@example(581, 1, 15)
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
        given_up = {name for name, causes in last["causes"].items() if "a gateway ended before" in str(causes)}
        for what in ("values", "states", "causes"):
            both = [{name: of[what][name] for name in of[what].keys() - given_up} for of in (last, live)]
            assert both[0] == both[1]
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


def test_of_a_call_that_fails_in_a_loop_no_request_is_kept() -> None:
    before = repeated(50).log.changes
    short = compacted(before)
    assert [type(decoded(change)) for change in short] == [type(decoded(change)) for change in before]
    assert size_bytes(short) < 50 * 150


def test_a_call_that_has_not_ended_keeps_its_request() -> None:
    client = Client(Random(0))
    call = call_of("c", CallBody((), ("v0", "v1"), None))
    client.core.executor.add(client.session, call, 0.0)
    client.core.executor.start(call, 0.0)
    client.core.executor.produce(call, "yes", 0.0)
    short = [decoded(change) for change in compacted(client.log.changes)]
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
        async with asyncio.timeout(WITHIN_S):
            while "Write" not in served.engine.running:  # noqa: ASYNC110 - the commits are a thread's
                await asyncio.sleep(0)
        await served.engine.refuse("Write")
        await asyncio.wait_for(chat.task, WITHIN_S)
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
        await asyncio.wait_for(first.stored(), WITHIN_S)
        may_go_on.set()
        await fail_in_a_loop(first, 1)
        await first.stored()
    async with durable(path) as second:
        got = await second.get("task")
        await second.stored()
        assert got.json["value"] == "a snake game"


def test_what_is_left_of_an_answered_request_says_its_model_and_form() -> None:
    body = b'{"model": "m", "stream": true, "messages": []}'
    left = once_answered(KeptRequest("answered", "/v1/chat/completions", (), body))
    assert json.loads(left.body) == {"model": "m", "stream": True}
