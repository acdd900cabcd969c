"""Lines that are refused for their tenant's limits wait, and keep no other tenant's lines from their engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import cast

import msgspec
import pytest

from plait.gateway import tables
from plait.gateway.api.call_api import CallApi
from plait.gateway.guests.batches import runner as module
from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.desk import TABLES, Desk, FileRecord
from plait.gateway.guests.batches.line_call import Outcome
from plait.gateway.guests.batches.runner import MOST_REFUSED, MOST_TRIES, Runner
from plait.gateway.guests.batches.running import Running
from tests.gateway.guests.batches.test_feeder import SLOTS, fleet
from tests.gateway.guests.batches.test_runner import end
from tests.waiting import WITHIN_S

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
LINE = json.dumps({"custom_id": "0000", "url": "/v1/chat/completions", "body": BODY})
REFUSED = Outcome(429, b"{}", 60.0)
FAILED = Outcome(500, b"{}")
ANSWERED = Outcome(200, b"{}")


class Batches:
    """A runner before one engine. `answers` has what each tenant's next lines come to, the last one again and again."""

    def __init__(self) -> None:
        self.desk = Desk(tables.in_sqlite(TABLES, None))
        self.thread = tables.TablesThread("batches")
        _, self.feeder = fleet("one")
        no_api = cast("Callable[[], CallApi]", lambda: None)
        self.runner = Runner(
            self.desk, self.thread, self.feeder, no_api, serves=lambda _: True, weights={}, ended_keys=list
        )
        self.answers: dict[str, list[Outcome]] = {}
        self.asked = Counter[str]()

    def add(self, tenant: str, lines: int, *answers: Outcome) -> None:
        self.answers[tenant] = [*answers]
        text = "\n".join(LINE.replace("0000", f"{at:04}") for at in range(lines)).encode()
        self.desk.put_file(tenant, FileRecord(f"file-{tenant}", "a", "batch", 0), [(0, text)])
        now = int(time.time())
        batch = Batch(tenant, tenant, tenant, "", "/v1/chat/completions", f"file-{tenant}", "24h", now, now + 86_400)
        assert self.desk.add(msgspec.structs.replace(batch, status="in_progress", model="m", total=lines), 9)

    async def ask(self, _api: None, batch: Batch, *_: object) -> Outcome:
        self.asked[batch.tenant] += 1
        await asyncio.sleep(0)
        answers = self.answers[batch.tenant]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Run the batches until something holds."""
        self.tasks = [asyncio.create_task(work()) for work in (self.runner.keep, self.runner.send)]
        async with asyncio.timeout(WITHIN_S):
            while not holds():  # noqa: ASYNC110 - what it reads sets no event
                await asyncio.sleep(0.005)


@pytest.fixture
async def batches(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Batches]:
    monkeypatch.setattr(module, "FAILED_S", 0.005)
    made = Batches()
    monkeypatch.setattr(module, "ask", made.ask)
    yield made
    await end(made.runner, made.tasks, made.desk, made.thread)


async def test_a_tenant_at_a_limit_is_asked_a_few_lines_at_a_time(batches: Batches) -> None:
    batches.add("blue", 500, REFUSED)
    batches.add("red", 300, ANSWERED)
    await batches.until(lambda: batches.asked["red"] == 300 and batches.asked["blue"] >= MOST_REFUSED)
    await asyncio.sleep(0.1)
    assert batches.asked["blue"] < MOST_REFUSED + SLOTS, "those of the engine's slots were sent at once"
    served = batches.runner._shares.served
    assert served("blue") <= served("red"), "what is refused counts in no turn"


async def test_a_line_that_runs_alone_and_is_refused_keeps_no_engine(batches: Batches) -> None:
    batches.add("blue", 1, FAILED, REFUSED)
    batches.add("red", 300, ANSWERED)
    await batches.until(lambda: batches.asked["red"] == 300 and batches.asked["blue"] > 1)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_line_that_the_only_engine_fails_is_tried_three_times(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    if is_late:
        monkeypatch.setattr(Running, "is_late", True)
        monkeypatch.setattr(batches.feeder, "engine_for", lambda *_: None)
    batches.add("blue", 1, FAILED)
    await batches.until(lambda: batches.runner.keeper.counts["m", "failed"] == 1)
    assert batches.asked["blue"] == MOST_TRIES
