"""A line that gateways die of runs alone, and fails; others are answered once, however many gateways die or stop."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from plait.gateway import tables
from plait.gateway.api.call_api import CallApi
from plait.gateway.guests.batches import keeper
from plait.gateway.guests.batches import runner as module
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.checking import Line
from plait.gateway.guests.batches.desk import LEASE_S, TABLES, Desk, FileRecord
from plait.gateway.guests.batches.feeder import Feeder
from plait.gateway.guests.batches.line_call import Outcome
from plait.gateway.guests.batches.runner import Runner
from tests.waiting import WITHIN_S

CHAT = "/v1/chat/completions"
LINES = 24
AT_ONCE = 4
LINE_S = 0.002
KILLER = "kill"


class Room:
    """The feeder of an engine that takes `AT_ONCE` lines."""

    def __init__(self) -> None:
        self.lines = 0
        self._turn = asyncio.Lock()

    def engines(self, _model: str) -> list[str]:
        return ["one"]

    def engine_for(self, _model: str, tokens: Callable[[str], float | None], _now_s: float) -> str | None:
        return "one" if self.lines < AT_ONCE and tokens("one") is not None else None

    def sent(self, _engine: str, _tokens: float, _now_s: float) -> None:
        self.lines += 1

    def ended(self, _sent: None) -> None:
        self.lines -= 1

    def wake(self) -> None: ...

    async def change(self, **_looks: bool) -> None:
        await asyncio.sleep(LINE_S / 2)

    @asynccontextmanager
    async def alone(self, _model: str, _avoid: str, _is_over: Callable[[], bool]) -> AsyncIterator[str]:
        async with self._turn:
            yield "one"


class Thread(tables.TablesThread):
    """Does nothing any more once its gateway is dead."""

    is_dead = False

    async def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_dead:
            await asyncio.Future()
        return await super().run(work, *args, **kwargs)


class Gateways:
    """One gateway after the other runs a batch. Its line `KILLER` kills one after so long; None: it kills none."""

    def __init__(self, path: Path, kills_after_s: float | None) -> None:
        self._path = path
        self.desk = Desk(tables.in_sqlite(TABLES, path))
        self.asked: list[tuple[str, int]] = []
        """The text of each line that was sent, and how many others were on the engine."""
        self.deaths = 0
        self.failures = 0
        """How often the engine fails `KILLER` before it answers."""
        self._kills_after_s = kills_after_s
        texts = [KILLER if at == 10 else f"line {at}" for at in range(LINES)]
        bodies = [{"model": "demo", "messages": [{"role": "user", "content": text}]} for text in texts]
        lines = [{"custom_id": str(at), "url": CHAT, "body": body} for at, body in enumerate(bodies)]
        data = "\n".join(map(json.dumps, lines)).encode()
        self.desk.put_file("blue", FileRecord("file-1", "a", "batch", 0), [(0, data)])
        now = int(time.time())
        assert self.desk.add(Batch("batch_1", "blue", "blue", "", CHAT, "file-1", "24h", now, now + 86_400), 9)

    @property
    def batch(self) -> Batch:
        found = self.desk.batch("blue", "batch_1")
        assert found is not None
        return found

    @property
    def is_running(self) -> bool:
        return self.batch.status != "completed"

    async def ask(self, _api: None, _batch: Batch, line: Line, *_rest: object) -> Outcome:
        text = json.loads(bytes(line.body))["messages"][0]["content"]
        self.asked.append((text, self.room.lines - 1))
        if text == KILLER and self.failures:
            self.failures -= 1
            return Outcome(502, b"{}")
        if text == KILLER and self._kills_after_s is not None:
            await asyncio.sleep(self._kills_after_s)
            self._die()
        await asyncio.sleep(LINE_S)
        self._left -= 1
        if not self._left:
            self._die() if self._dies else self._ends.set()
        return Outcome(200, b"{}")

    def _die(self) -> None:
        self.thread.is_dead = True
        self.deaths += 1
        self._ends.set()

    def store(self, **changes: Any) -> None:
        """Change the batch as it is stored."""
        batch = msgspec.structs.replace(self.batch, **changes)
        with self.desk.database.transaction() as run:
            asked = "UPDATE {}batches_batches SET record = %s, status = %s"
            run(asked, msgspec.json.encode(batch).decode(), batch.status)

    async def run_one(self, lines: int = 0, *, dies: bool = False, stops: asyncio.Event | None = None) -> None:
        """Run a gateway until it dies or the batch has ended; or it `dies`, or stops, after so many answers.

        With `stops`, it stops in order when that is set.
        """
        self._left, self._dies, self._ends = lines, dies, asyncio.Event()
        self.room, self.thread = Room(), Thread("batches")
        feeder, no_api = cast("Feeder", self.room), cast("Callable[[], CallApi]", lambda: None)
        desk = Desk(tables.in_sqlite(TABLES, self._path))
        runner = Runner(desk, self.thread, feeder, no_api, serves=lambda _: True, weights={}, ended_keys=list)
        tasks = [asyncio.create_task(work()) for work in (runner.keep, runner.send, self._watch)]
        async with asyncio.timeout(WITHIN_S):
            await (stops or self._ends).wait()
        if not self.thread.is_dead:
            await runner.close()
        while any(not task.done() for task in tasks):
            tasks += [*runner._tasks, *(task for run in runner.running.values() for task in run.asked)]
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await self.thread.close(desk.close)
        self.desk.release(runner._owner)

    async def _watch(self) -> None:
        while self.is_running:  # noqa: ASYNC110 - another connection ends it
            await asyncio.sleep(LINE_S)
        self._ends.set()

    def answers(self) -> list[tuple[str, str | None]]:
        """The id of each line with its error; None: it has an answer."""
        files = filter(None, (self.batch.output_file_id, self.batch.error_file_id))
        lines = [json.loads(line) for file_id in files for line in self.desk.part(file_id, 0).splitlines()]
        return sorted((line["custom_id"], line["error"] and line["error"]["code"]) for line in lines)


WHOLE = sorted((str(at), None) for at in range(LINES))
WITHOUT_KILLER = [(name, "line_failed" if name == "10" else None) for name, _ in WHOLE]


Begin = Callable[[float | None], Gateways]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    made: list[Gateways] = []

    def begin(kills_after_s: float | None) -> Gateways:
        made.append(Gateways(tmp_path / "files", kills_after_s))
        monkeypatch.setattr(module, "ask", made[-1].ask)
        return made[-1]

    monkeypatch.setattr(keeper, "WRITE_S", 0.001)
    monkeypatch.setattr(module, "FAILED_S", 0.001)
    yield begin
    for gateways in made:
        gateways.desk.close()


@pytest.mark.parametrize("after_s", [0.0, 8 * LINE_S], ids=["at once", "slowly"])
async def test_a_line_that_gateways_die_of_fails(begin: Begin, after_s: float) -> None:
    gateways = begin(after_s)
    while gateways.is_running:
        await gateways.run_one()
    assert gateways.answers() == WITHOUT_KILLER
    assert 3 <= gateways.deaths <= 4, "the first may die before anything is written of the line"
    assert [beside for text, beside in gateways.asked if text == KILLER][-1] == 0
    others = Counter(text for text, _ in gateways.asked if text != KILLER)
    assert max(others.values()) <= 1 + gateways.deaths


async def test_what_has_no_answer_when_gateways_stop_in_order_is_no_suspect(begin: Begin) -> None:
    gateways = begin(None)
    for _ in range(4):
        await gateways.run_one(lines=2)
        assert (gateways.batch.deaths, gateways.batch.sent, gateways.batch.cut_off) == (0, (), {})
    await gateways.run_one()
    assert gateways.answers() == WHOLE


async def test_lines_that_one_gateway_died_with_run_beside_others(begin: Begin) -> None:
    gateways = begin(None)
    for _ in range(2):
        await gateways.run_one(lines=AT_ONCE + 1, dies=True)
    gateways.asked.clear()
    await gateways.run_one()
    assert gateways.answers() == WHOLE
    assert max(beside for _, beside in gateways.asked) == AT_ONCE - 1


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_suspect_is_tried_as_often_as_other_lines(begin: Begin, failures: int) -> None:
    gateways = begin(None)
    gateways.failures = failures
    gateways.store(deaths=2, cut_off={10: 2})
    await gateways.run_one()
    assert gateways.answers() == WHOLE
    assert {text for text, _ in gateways.asked[-1 - failures :]} == {KILLER}, "after all others"


async def test_a_gateway_that_stops_before_it_begins_keeps_the_marks(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateways, checks = begin(None), asyncio.Event()
    gateways.store(status="in_progress", model="demo", total=LINES, deaths=2, sent=(10,), cut_off={10: 1, 3: 1})

    async def checked(*_asked: object) -> None:
        checks.set()
        await asyncio.sleep(LINE_S)

    monkeypatch.setattr(keeper.Keeper, "checked", checked)
    await gateways.run_one(stops=checks)
    assert (gateways.batch.deaths, gateways.batch.sent, gateways.batch.cut_off) == (2, (10,), {10: 1, 3: 1})


async def test_after_an_outage_of_the_database_others_renew_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of another gateway is over, since the database was away for both."""
    begun_s, claims, clock = 100.0, list[float](), [100.0]

    async def run(work: Callable[..., Any], *_asked: object) -> list[Any]:
        if work.__name__ == "claim":
            claims.append(clock[0] - begun_s)
        return []

    monkeypatch.setattr(module, "loop_time_s", lambda: clock[0])
    desk, thread = Desk(tables.in_sqlite(TABLES, None)), cast("Thread", SimpleNamespace(run=run))
    room, no_api = cast("Feeder", Room()), cast("Callable[[], CallApi]", lambda: None)
    runner = Runner(desk, thread, room, no_api, serves=lambda _: True, weights={}, ended_keys=list)
    back_s = 2 + LEASE_S
    for after_s in (0, 1, back_s, back_s + 1, back_s + LEASE_S - 1, back_s + LEASE_S):
        clock[0] = begun_s + after_s
        await runner._look()
    assert claims == [0, 1, back_s + LEASE_S]
    desk.close()
