"""Batches whose lines engines fail, or whose database is away: each line has one answer, and none is lost."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, Final

import openai
import pytest

from e2e.sdk import sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from e2e.stub_engine import JSON, Received, Script, StubEngine
from tests.waiting import WITHIN_S

CHAT: Final = "/v1/chat/completions"
LINES: Final = 120
LINE_S: Final = 0.05
DEAD_S: Final = 0.5
ENDED: Final = ("completed", "failed", "expired", "cancelled")


class Mortal(StubEngine):
    """Dies of a line that says `kill`: all its answers break off, and for a while it gives no other. Answers a line
    that says `fail`, or each if it `is_sick`, with 500.

    A line takes `LINE_S`, one that kills four times as long.
    """

    def __init__(self) -> None:
        super().__init__(routes=[CHAT])
        self.is_sick = False
        self.died_s = -DEAD_S
        self.beside_killers: list[int] = []
        """How many other lines each line that killed it found here."""
        self._lock, self._running = Lock(), 0

    def answer(self, received: Received) -> Script:
        began_s, asked = time.monotonic(), received.body
        with self._lock:
            self._running += 1
        kills = b"kill" in asked
        time.sleep(LINE_S * (4 if kills else 1))
        with self._lock:
            self._running -= 1
            if kills:
                self.died_s = time.monotonic()
                self.beside_killers.append(self._running)
            if self.died_s > began_s - DEAD_S:
                return Script(ending="cut")
        if self.is_sick or b"fail" in asked:
            return Script([b'{"error": {"message": "CUDA error"}}'], 500, JSON)
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return Script(
            [json.dumps({"id": "c", "object": "chat.completion", "choices": [choice]}).encode()], headers=JSON
        )


class Batches:
    """Runs a batch of lines that say these words, and returns the answers: what is wrong with each, or None."""

    def __init__(self, gateway: Server, client: openai.OpenAI, engines: list[Mortal], files: Path) -> None:
        self.gateway = gateway
        self.engines = engines
        self.files = files
        self._client = client

    def run(self, *words: str) -> list[str | None]:
        return self.answers(self.begin(*words))

    def begin(self, *words: str) -> str:
        said = [[{"role": "user", "content": f"{word} {at}"}] for at, word in enumerate(words)]
        asked = [{"model": "demo", "max_tokens": 4, "messages": messages} for messages in said]
        lines = [{"custom_id": str(at), "method": "POST", "url": CHAT, "body": body} for at, body in enumerate(asked)]
        data = "\n".join(map(json.dumps, lines)).encode()
        file = self._client.files.create(file=("lines.jsonl", data), purpose="batch")
        return self._client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id

    def answers(self, batch_id: str) -> list[str | None]:
        eventually(lambda: self._client.batches.retrieve(batch_id).status in ENDED)
        batch = self._client.batches.retrieve(batch_id)
        assert (batch.status, batch.request_counts is None) == ("completed", False)
        told: dict[str, str | None] = {}
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            for one in map(json.loads, self._client.files.content(file_id).text.splitlines()):
                assert one["custom_id"] not in told
                told[one["custom_id"]] = self._problem(one)
        return [told[str(at)] for at in range(len(told))]

    def _problem(self, answer: dict[str, Any]) -> str | None:
        if answer["error"] is not None:
            return str(answer["error"]["code"])
        status = answer["response"]["status_code"]
        return None if status == 200 else str(status)


@pytest.fixture
def batches(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Batches]:
    engines = [Mortal() for _ in range(request.param)]
    with Launcher(tmp_path) as launch:
        for engine in engines:
            engine.__enter__()
        listed = [{"name": f"stub-{at}", "url": engine.url} for at, engine in enumerate(engines)]
        gateway = launch.gateway(listed, store={"path": str(tmp_path / "plait.db")})
        gateway.start()
        gateway.wait_until_ready()
        try:
            with sync_client(gateway) as client:
                (files,) = tmp_path.glob("*.files")
                yield Batches(gateway, client, engines, files)
        finally:
            for engine in engines:
                engine.__exit__(None, None, None)


@pytest.mark.parametrize("batches", [3], indirect=True)
def test_a_line_that_kills_engines_reaches_two(batches: Batches) -> None:
    words = ["hello"] * LINES
    words[LINES // 2] = "kill"
    found = batches.run(*words)
    assert [problem for word, problem in zip(words, found, strict=True) if word == "kill"] == ["line_failed"]
    assert set(found) == {None, "line_failed"}
    first, second = sorted((engine.beside_killers for engine in batches.engines), key=len)[1:]
    assert len(first) == len(second) == 1
    assert min(first + second) == 0


@pytest.mark.parametrize("batches", [1], indirect=True)
def test_a_line_that_kills_the_only_engine_is_tried_three_times(batches: Batches) -> None:
    found = batches.run(*["hello"] * 20, "kill", *["hello"] * 20)
    assert found == [None] * 20 + ["line_failed"] + [None] * 20
    (engine,) = batches.engines
    assert len(engine.beside_killers) == 3
    assert engine.beside_killers[1:] == [0, 0]


@pytest.mark.parametrize("batches", [2], indirect=True)
def test_lines_of_a_sick_engine_are_answered_by_another(batches: Batches) -> None:
    batches.engines[0].is_sick = True
    assert set(batches.run(*["hello"] * LINES)) == {None}


@pytest.mark.parametrize("batches", [2], indirect=True)
def test_a_line_that_all_engines_fail_has_failed(batches: Batches) -> None:
    assert batches.run("hello", "fail", "hello", "fail") == [None, "line_failed", None, "line_failed"]
    assert sum(b"fail" in one.body for engine in batches.engines for one in engine.received) == 4


def test_lines_wait_while_no_engine_is_there(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        engine = launch.engine("away")
        gateway = launch.gateway([engine], store={"path": str(tmp_path / "plait.db")})
        fleet = Fleet(gateway, {engine.name: engine})
        fleet.start()
        with sync_client(gateway) as client:
            batches = Batches(gateway, client, [], tmp_path)
            begun = batches.begin(*["hello"] * 2 * LINES)
            eventually(lambda: gateway.metric("plait_batch_lines_total") > 0)
            engine.kill()
            eventually(lambda: gateway.metric("plait_batches_blocked", why="no_engine") == 1)
            engine.start()
            assert batches.answers(begun) == [None] * 2 * LINES


@pytest.mark.parametrize("batches", [1], indirect=True)
def test_lines_wait_while_their_database_is_away(batches: Batches) -> None:
    begun = batches.begin(*["hello"] * LINES)
    eventually(lambda: batches.gateway.metric("plait_batch_lines_total") > 0)
    with sqlite3.connect(batches.files, isolation_level=None, timeout=WITHIN_S) as another:
        another.execute("BEGIN IMMEDIATE")
        eventually(lambda: batches.gateway.metric("plait_batches_blocked", why="store") == 1)
        told = batches.gateway.get("/v1/files")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "store_failed")
        another.execute("ROLLBACK")
    eventually(lambda: batches.gateway.get("/v1/files").status_code == 200)
    assert batches.answers(begun) == [None] * LINES
