"""Stores that cannot be written, are held by another gateway, or cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from plait.gateway.app import Gateway
from plait.gateway.config.sections import Config, StoreConfig
from plait.gateway.guests.durability.replay import Replay
from plait.gateway.guests.programs.core.record import SessionEvent
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.guests.store import group_commit
from plait.gateway.guests.store.event_log import UNREADABLE
from plait.gateway.guests.store.sqlite_keeper import SqliteKeeper
from plait.gateway.guests.store.sqlite_schema import MIGRATIONS
from plait.gateway.streams import Change, StreamKey
from plait.policy.programs.request_graph_state import GraphTransitionError
from tests.gateway.guests.durability.durable_gateway import DurableServed, durable, keeper_of
from tests.gateway.guests.programs.chained_gateway import CHAT, settle
from tests.pieces import at_once
from tests.waiting import WITHIN_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "plait.db"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "RETRY_S", 0.001)


def before_writing(served: DurableServed, *statements: str) -> None:
    """The store's thread executes these before its next commit: the connection is its own."""
    keeper = keeper_of(served)
    write, due = SqliteKeeper.write, [*statements]

    def writing(changes: Sequence[Change], *, again: bool = False) -> None:
        while due:
            keeper._opened.execute(due.pop(0))
        write(keeper, changes, again=again)

    keeper.write = writing  # type: ignore[method-assign]


async def fail(served: DurableServed, *, readonly: bool = False) -> None:
    """The disk is full from now on, or the file read-only."""
    before_writing(served, "PRAGMA query_only = ON" if readonly else "PRAGMA max_page_count = 1")


async def mend(served: DurableServed) -> None:
    before_writing(served, "PRAGMA query_only = OFF", "PRAGMA max_page_count = 1000000")
    async with asyncio.timeout(WITHIN_S):
        while served.durability.problem is not None:  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0.001)


async def plain_call(served: DurableServed) -> None:
    """It gets to where engines are looked for, of which none is there."""
    plain = await served.send(CHAT, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
    await asyncio.wait_for(plain.task, WITHIN_S)
    assert plain.refusal == (503, "no_engine_available")


BIG = "x" * 50_000


@pytest.mark.parametrize("readonly", [False, True])
async def test_what_runs_goes_on_and_says_that_it_is_not_durable(path: Path, readonly: bool) -> None:
    async with durable(path) as served:
        await served.submit("Write {{code}}", "code")
        served.waits = False
        await fail(served, readonly=readonly)
        big = await served.value("big", BIG)
        await asyncio.wait_for(big.task, WITHIN_S)
        assert (big.status, big.headers[b"plait-durable"]) == (200, b"false")
        chat = await served.chat("Of it", output="out")
        await served.engine.answer("Of it", "y")
        await asyncio.wait_for(chat.task, WITHIN_S)
        assert (chat.text, chat.headers[b"plait-durable"]) == ("y", b"false")
        new = await served.chat("Write", output="code", session="new")
        assert new.refusal == (503, "store_failed")
        assert new.headers[b"retry-after"] == b"1"
        in_memory = await served.value("x", "1", plait_durable="false")
        assert in_memory.status == 200
        await plain_call(served)
        await mend(served)
        served.waits = True
        assert b"plait-durable" not in (await served.value("small", "1")).headers
        assert (await served.send("/v1/sessions", {"session_id": "new"})).status == 200
    async with durable(path, max_attempts=3) as second:
        got = await second.get("out")
        assert got.json["value"] == "y", "what came meanwhile is written as soon as that is possible"


async def test_a_second_gateway_waits_for_the_first_and_serves_plain_calls(path: Path) -> None:
    async with durable(path) as first:
        await first.value("task", "x")
        second = DurableServed(path)
        recovering = asyncio.ensure_future(second.recover())
        async with asyncio.timeout(WITHIN_S):
            while second.durability.problem is None:  # noqa: ASYNC110 - of a thread
                await asyncio.sleep(0.001)
        refused = await second.get("task")
        assert refused.refusal == (503, "recovering")
        assert refused.json["error"]["message"] == "Sessions cannot be used yet: the store cannot be used. Try again."
        await plain_call(second)
    await recovering
    got = await second.get("task")
    assert got.json["value"] == "x"
    await second.kill()


def change(path: Path) -> None:
    """As a disk does that forgets bits."""
    path.write_bytes(path.read_bytes().replace(b"the right text", b"the wrong text", 5))


def unreadable(path: Path) -> dict[StreamKey, int]:
    """What was set aside in the store, with the number of events of each."""
    keeper = SqliteKeeper(path)
    keeper.open()
    found = {stream.key: len(stream.events) for stream in keeper.read() if stream.key.kind.startswith(UNREADABLE)}
    keeper.close()
    return found


async def test_a_session_whose_log_was_changed_is_set_aside_alone(path: Path) -> None:
    async with durable(path) as first:
        await first.value("task", "the right text " * 500)
        await first.chat("Write", output="code", session="other")
        await first.engine.answer("Write", "x = 1")
    change(path)
    async with durable(path) as second:
        assert [session.session_id for session in second.executor.sessions] == ["other"]
        assert second.durability.damage.counts["stream"] == 1
        again = await second.chat("Write", output="code", session="other")
        assert again.text == "x = 1"
        await second.value("task", "anew")
    ((key, events),) = unreadable(path).items()
    assert (key.kind, key.name, events) == ("unreadable session", "s", 2)
    async with durable(path) as third:
        assert (await third.get("task")).json["value"] == "anew"
        assert third.durability.damage.counts["stream"] == 0, "it is not looked at again"


async def test_a_session_that_a_defect_cannot_make_again_is_set_aside_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with durable(path) as first:
        await first.submit("Write {{code}} of {{later}}", "code", inputs=("later",))
        await first.chat("Write", output="code", session="other")
        await first.engine.answer("Write", "x = 1")
    run = Replay.run

    def failing(replay: Replay, events: Sequence[SessionEvent], when_whole: Callable[[Session], None]) -> None:
        run(replay, events, when_whole)
        if replay.session.session_id == "s":
            raise GraphTransitionError("a defect")

    monkeypatch.setattr(Replay, "run", failing)
    async with durable(path) as second:
        assert [session.session_id for session in second.executor.sessions] == ["other"]
        assert second.durability.damage.counts["stream"] == 1
        monkeypatch.undo()
        await second.value("task", "anew")
    assert [key.kind for key in unreadable(path)] == ["unreadable session"]
    async with durable(path) as third:
        assert (await third.get("task")).json["value"] == "anew"


async def test_a_recovery_that_begins_again_leaves_sessions_as_they_are(path: Path) -> None:
    async with durable(path) as first:
        await first.value("task", "x")
    async with durable(path) as second:
        await second.value("more", "y")
        await second.recover()
        assert (await second.get("more")).json["value"] == "y"


UNKNOWN_EVENTS = [(b"nothing that was ever written", 1), (b"\x91\xa6closed", 2)]


@pytest.mark.parametrize(("data", "version"), UNKNOWN_EVENTS)
async def test_a_session_with_events_that_are_unknown_here_is_set_aside_alone(
    path: Path, data: bytes, version: int
) -> None:
    async with durable(path) as first:
        await first.value("task", "a snake game")
        await first.send("/v1/sessions", {"session_id": "other"})
        (key,) = [key for key in keeper_of(first)._streams if key.name == "s"]
        first.durability.append([Change(key, 1.0, data, version)])
        await first.stored()
    async with durable(path) as second:
        assert [session.session_id for session in second.executor.sessions] == ["other"]
        assert second.durability.damage.counts["stream"] == 1
    assert list(unreadable(path).values()) == [3]


def test_a_store_that_has_vanished_is_not_taken_for_a_new_one(path: Path) -> None:
    keeper = SqliteKeeper(path)
    keeper.open()
    keeper.close()
    path.unlink()
    with pytest.raises(ValueError, match="is gone, though a gateway has kept its sessions there: put it back, or rem"):
        Gateway(Config(store=StoreConfig(path=str(path))))


def test_a_store_that_can_never_be_used_ends_the_start(path: Path) -> None:
    later = SqliteKeeper(path, version=2)
    later.open()
    later.close()
    with pytest.raises(ValueError, match=r"written by a later version of Plait \(events 2, this one knows 1\)"):
        Gateway(Config(store=StoreConfig(path=str(path))))
    later = SqliteKeeper(path, version=2, migrations=[*MIGRATIONS, lambda _: None])
    later.open()
    later.close()
    with pytest.raises(ValueError, match=r"written by a later version of Plait \(schema"):
        Gateway(Config(store=StoreConfig(path=str(path))))


async def test_stored_responses_outlive_the_gateway(path: Path) -> None:
    async with durable(path) as first:
        stored, now_s = first.gateway.house[StoredResponses], asyncio.get_running_loop().time()
        for number in range(3):
            stored.put("t", f"r{number}", previous=None, items=b"[]", answer=b'{"output": []}', now_s=now_s + number)
        assert await stored.once_stored("t", "r2", "stored", str.upper) == "stored"
        stored.delete("t", "r1", now_s + 3)
        await first.stored()
    async with durable(path) as second:
        now_s = asyncio.get_running_loop().time()
        assert at_once(second.gateway.house[StoredResponses].said_before("t", "r2", lambda _size: None, now_s)) == []
        with pytest.raises(Exception, match="no response 'r1'"):
            second.gateway.house[StoredResponses].get("t", "r1", now_s)


async def test_stored_responses_cannot_be_continued_until_they_are_read(path: Path) -> None:
    served = DurableServed(path)
    asked = await served.send("/v1/responses/r1", method="GET")
    await settle()
    assert asked.refusal == (503, "recovering")
    await served.recover()
    await served.kill()
