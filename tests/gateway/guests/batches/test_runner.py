"""Lines are sent by one decision for all batches of a model, in the turns of tenants."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import cast

import msgspec
import pytest

from plait.gateway import tables
from plait.gateway.api.call_api import CallApi
from plait.gateway.guests.batches import runner as module
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.desk import TABLES, Desk, FileRecord
from plait.gateway.guests.batches.feeder import Feeder
from plait.gateway.guests.batches.line_call import Outcome
from plait.gateway.guests.batches.runner import LATE_AT_ONCE, MOST_READY_BYTES, Runner
from plait.gateway.guests.batches.running import Running
from tests.waiting import WITHIN_S

MANY = 128
LINES = 100
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
LINE = json.dumps({"custom_id": "0000", "url": "/v1/chat/completions", "body": BODY})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - what it reads sets no event
            await asyncio.sleep(0.001)


class Room:
    """A feeder of an engine `one` that has room for so many lines of each model. A look comes when the test says so."""

    def __init__(self) -> None:
        self.room: dict[str, int] = {}
        self.asked = 0
        """How often it was asked for room for a batch's line."""
        self.looks: bool | None = None
        """Whether the runner looks now and then."""
        self._look = asyncio.Event()

    def engines(self, _model: str) -> list[str]:
        return ["one"]

    def engine_for(self, model: str, tokens: Callable[[str], float | None], _now_s: float) -> str | None:
        count = tokens("one")
        self.asked += count != 0.0
        return "one" if count is not None and (count == 0.0 or self.room.get(model, 0)) else None

    def sent(self, _engine: str, _tokens: float, _now_s: float) -> None:
        self.room["demo"] -= 1

    def ended(self, _sent: None) -> None: ...

    def wake(self) -> None: ...

    async def change(self, *, looks: bool) -> None:
        self.looks = looks
        await self._look.wait()

    async def look(self) -> None:
        """Let all look once that wait for a change."""
        look, self._look = self._look, asyncio.Event()
        look.set()
        for _ in range(10 * MANY):
            await asyncio.sleep(0)


class Batches:
    """A runner with its batches. No line has an answer."""

    def __init__(self) -> None:
        self.desk = Desk(tables.in_sqlite(TABLES, None))
        self.thread = tables.TablesThread("batches")
        self.room = Room()
        self.sent: list[str] = []
        """The batches whose lines were sent, in order."""
        feeder, no_api = cast("Feeder", self.room), cast("Callable[[], CallApi]", lambda: None)
        self.runner = Runner(self.desk, self.thread, feeder, no_api, serves=lambda _: True, weights={}, ended_keys=list)
        lines = "\n".join(LINE.replace("0000", f"{at:04}") for at in range(LINES)).encode()
        for tenant in ("blue", "red"):
            self.desk.put_file(tenant, FileRecord(f"file-{tenant}", "a", "batch", 0), [(0, lines)])

    def add(self, name: str, tenant: str = "blue", due_s: int = 86_400, *, model: str = "demo") -> None:
        now = int(time.time())
        file = f"file-{tenant}"
        batch = Batch(name, tenant, tenant, "", "/v1/chat/completions", file, "24h", now, now + due_s)
        assert self.desk.add(msgspec.structs.replace(batch, status="in_progress", model=model, total=LINES), MANY)

    async def begin(self) -> None:
        """Run them until all of them wait for room."""
        added = len(self.desk.batches("blue", MANY, "z")) + len(self.desk.batches("red", MANY, "z"))
        self.tasks = [asyncio.create_task(work()) for work in (self.runner.keep, self.runner.send)]
        await until(lambda: sum(run.is_waiting for run in self.runner.running.values()) == added)

    async def ask(self, _api: None, batch: Batch, *_: object) -> Outcome:
        self.sent.append(batch.id)
        return await asyncio.Future[Outcome]()


async def end(runner: Runner, tasks: list[asyncio.Task[None]], desk: Desk, thread: tables.TablesThread) -> None:
    """Stop a gateway's batches."""
    await runner.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await thread.close(desk.close)


@pytest.fixture
async def batches(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Batches]:
    made = Batches()
    monkeypatch.setattr(module, "ask", made.ask)
    yield made
    await end(made.runner, made.tasks, made.desk, made.thread)


async def test_a_look_asks_once_for_each_batch(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(MANY):
        batches.add(f"batch_{at}")
    await batches.begin()
    shares = batches.runner._shares
    served, asked = shares.served, list[str]()

    def counted(tenant: str) -> float:
        asked.append(tenant)
        return served(tenant)

    monkeypatch.setattr(shares, "served", counted)
    batches.room.asked = 0
    await batches.room.look()
    assert (batches.room.asked, len(asked)) == (MANY, MANY)


async def test_a_gateway_without_batches_does_not_look(batches: Batches) -> None:
    await batches.begin()
    await batches.room.look()
    assert batches.room.looks is False
    await batches.thread.run(batches.add, "one")
    batches.runner.wake()
    await until(lambda: bool(batches.runner.running))
    await batches.room.look()
    assert batches.room.looks is True


async def test_tenants_take_turns_and_what_is_due_first_goes_first(batches: Batches) -> None:
    batches.add("blue-later", due_s=3000)
    batches.add("blue-first", due_s=2000)
    batches.add("red", "red")
    batches.add("other", "red", model="other")
    await batches.begin()
    batches.room.room["demo"] = 6
    await batches.room.look()
    await until(lambda: len(batches.sent) == 6)
    assert sorted(batches.sent) == ["blue-first"] * 3 + ["red"] * 3


async def test_a_late_batch_sends_some_lines_without_room(batches: Batches) -> None:
    batches.add("patient", due_s=2000)
    batches.add("late", due_s=3000)
    await batches.begin()
    batches.runner.running["late"].began_s -= 2900
    await batches.room.look()
    asked = {name: len(run.asked) for name, run in batches.runner.running.items()}
    assert asked == {"patient": 0, "late": LATE_AT_ONCE}


async def test_what_is_cancelled_over_or_lost_sends_nothing(batches: Batches) -> None:
    for name in ("cancelled", "over", "lost", "goes-on"):
        batches.add(name)
    await batches.begin()
    running = batches.runner.running
    running["cancelled"].is_cancelled = running["lost"].lost = True
    running["over"].batch = msgspec.structs.replace(running["over"].batch, expires_at=0)
    batches.room.room["demo"] = LINES + 1
    await batches.room.look()
    await until(lambda: len(batches.sent) == LINES)
    assert set(batches.sent) == {"goes-on"}


async def test_a_batch_that_is_cancelled_ends(batches: Batches) -> None:
    batches.add("cancelled")
    batches.add("goes-on")
    await batches.begin()
    await batches.thread.run(batches.desk.cancel, "blue", "cancelled", 100)
    batches.runner.wake()
    await until(lambda: not batches.runner.running.keys() - {"goes-on"})
    found = await batches.thread.run(batches.desk.batch, "blue", "cancelled")
    assert found is not None
    assert (found.status, found.failed) == ("cancelled", LINES)


async def test_no_line_is_sent_behind_many_bytes_that_are_not_written(batches: Batches) -> None:
    batches.add("full")
    batches.add("other")
    await batches.begin()
    batches.runner.running["full"].ready_bytes = MOST_READY_BYTES + 1
    batches.room.room["demo"] = 1
    await batches.room.look()
    assert batches.room.room == {"demo": 1}
    batches.runner.running["full"].ready_bytes = 0
    await batches.room.look()
    assert batches.room.room == {"demo": 0}


async def test_a_defect_of_a_line_fails_that_line_only(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_api: None, batch: Batch, *arguments: object) -> Outcome:
        monkeypatch.setattr(module, "ask", batches.ask)
        raise LookupError(batch.id)

    monkeypatch.setattr(module, "ask", broken)
    batches.add("batch_one")
    await batches.begin()
    batches.room.room["demo"] = 2
    await batches.room.look()
    await until(lambda: batches.sent == ["batch_one"] and batches.runner.running["batch_one"].saved.failed == 1)
    found = await batches.thread.run(lambda: batches.desk.answers("batch_one", -1, failed=True))
    (line,) = [json.loads(one.data) for one in found]
    assert (line["response"], line["error"]["code"]) == (None, "line_failed")


async def test_a_batch_that_a_defect_has_ended_leaves_no_answers(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(*_: object) -> Outcome:
        return Outcome(200, b"{}")

    async def broken(*_: object) -> bytes:
        raise LookupError

    monkeypatch.setattr(module, "ask", ask)
    batches.add("batch_1")
    await batches.begin()
    batches.room.room["demo"] = 5
    await batches.room.look()
    await until(lambda: batches.runner.running["batch_1"].saved.completed == 5)
    monkeypatch.setattr(batches.runner.keeper, "line", broken)
    batches.room.room["demo"] = 1
    await batches.room.look()
    await until(lambda: not batches.runner.running)
    assert await batches.thread.run(batches.desk.answered, "batch_1") == []


async def test_a_defect_beyond_a_line_ends_its_batch_only(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(run: Running, line: int) -> bytes:
        if run.batch.id == "batch_broken":
            raise LookupError(run.batch.id)
        return await read(run, line)

    read = batches.runner.keeper.line
    monkeypatch.setattr(batches.runner.keeper, "line", broken)
    batches.add("batch_broken", due_s=1_000)
    batches.add("batch_whole")
    await batches.begin()
    batches.room.room["demo"] = 1
    await batches.room.look()
    await until(lambda: [*batches.runner.running] == ["batch_whole"])
    batches.room.room["demo"] = 1
    await batches.room.look()
    await until(lambda: len(batches.sent) > 0)
    assert batches.sent == ["batch_whole"]
    (failed,) = [one for one in batches.desk.batches("blue", MANY, "z") if one.id == "batch_broken"]
    assert failed.status == "failed"
    assert [error.code for error in failed.errors] == ["internal_error"]
