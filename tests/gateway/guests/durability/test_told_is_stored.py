"""What a client is told was stored before, or is marked.

News that come while the store is waited for wait for it in their turn.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from plait.backends.errors import PlaitError
from plait.gateway.asgi import AsgiSink
from plait.gateway.guests.durability import recorded
from plait.gateway.guests.peers.membership import UnreachableStoreError
from plait.gateway.guests.programs.core.record import ValueSet
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.responses.responses_api import KeptResponse
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.guests.store import group_commit
from plait.gateway.streams import Change, StreamKey
from tests.gateway.guests.durability.durable_gateway import DurableServed, durable, keeper_of
from tests.gateway.guests.durability.test_durable_faults import fail, mend
from tests.gateway.guests.programs.chained_gateway import Exchange, settle
from tests.gateway.guests.translation.test_rewritten_answer import STREAM
from tests.waiting import WITHIN_S

PROGRAM: dict[str, Any] = {"session": "s", "external": ["a", "b", "c"], "gets": {"a": None, "b": None, "c": None}}


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DurableServed]:
    monkeypatch.setattr(group_commit, "RETRY_S", 0.001)
    async with durable(tmp_path / "plait.db") as served:
        yield served


class Stepped:
    """A store that writes one batch for each `step`. Each wait for it ends with the next of `between`."""

    def __init__(self, served: DurableServed, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written = list[Change]()
        self.between: list[Callable[[], None]] = []
        self._may = threading.Semaphore(0)
        self._keeper, self._served = keeper_of(served), served
        self._write, committed = self._keeper.write, served.durability.committed
        served.waits = False

        async def waited(stream: StreamKey) -> bool:
            is_stored = await committed(stream)
            if self.between:
                self.between.pop(0)()
            return is_stored

        monkeypatch.setattr(self._keeper, "write", self._held)
        monkeypatch.setattr(served.durability, "committed", waited)

    def _held(self, changes: Sequence[Change], *, again: bool = False) -> None:
        assert self._may.acquire(timeout=WITHIN_S)
        self._write(changes, again=again)
        self.written += changes

    async def step(self) -> None:
        """Write what has come."""
        before = len(self.written)
        self._may.release()
        async with asyncio.timeout(WITHIN_S):
            while len(self.written) == before:  # noqa: ASYNC110 - of a thread
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await settle()

    def stop(self) -> None:
        self._may.release(1000)
        self._served.waits = True


def session_of(served: DurableServed) -> Session:
    return served.executor.sessions.find(
        served.gateway.kernel.keys.check({"headers": [(b"x-api-key", b"one")]}), "s", 0.0
    )


def fill(served: DurableServed) -> None:
    """Write more than a full disk has room for."""
    session_of(served).record.write(ValueSet("big", "x" * 100_000), 0.0)


def set_value(served: DurableServed, name: str) -> Callable[[], None]:
    """Sets a variable at once, as another request may in this moment."""

    def set_it() -> None:
        served.executor.variables.set_value(session_of(served), name, f"of {name}", asyncio.get_running_loop().time())

    return set_it


def told(exchange: Exchange) -> dict[str, str]:
    """The values that a stream has brought."""
    parts = [part.split("\ndata: ") for part in exchange.body.decode().split("\n\n") if part.startswith("event: value")]
    return {value["name"]: value["value"] for _, data in parts for value in [json.loads(data)]}


def stored(stepped: Stepped) -> set[str]:
    return {
        name for name in "abc" if any(b"of %b" % name.encode() in (change.data or b"") for change in stepped.written)
    }


async def test_a_streamed_program_tells_only_values_that_are_stored(
    served: DurableServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.value("unused", "x")
    stepped = Stepped(served, monkeypatch)
    program = await served.send("/v1/programs", {**PROGRAM, "stream": True})
    stepped.between = [set_value(served, "b"), set_value(served, "c")]
    set_value(served, "a")()
    await settle()
    for _ in range(3):
        await stepped.step()
        assert told(program).keys() <= stored(stepped), "a value was told that a crash would lose"
    stepped.stop()
    await asyncio.wait_for(program.task, WITHIN_S)
    assert told(program) == {name: f"of {name}" for name in "abc"}


async def test_values_of_a_stream_that_are_not_stored_say_so(served: DurableServed) -> None:
    await served.value("unused", "x")
    served.waits = False
    program = await served.send("/v1/programs", {**PROGRAM, "stream": True})
    await served.stored()
    await fail(served)
    for name in "abc":
        set_value(served, name)()
    fill(served)
    await asyncio.wait_for(program.task, WITHIN_S)
    assert len(told(program)) == 3
    last = [
        json.loads(part.split("data: ")[1]) for part in program.body.decode().split("\n\n") if "event: done" in part
    ]
    assert last[0]["durable"] is False
    await mend(served)


async def test_a_failure_that_is_not_stored_says_so(served: DurableServed) -> None:
    await served.value("unused", "x")
    served.waits = False
    await fail(served)
    await served.send("/v1/variables", {"session_id": "s", "semantic_var_id": "bad", "error": "it is bad"})
    fill(served)
    got = await served.get("bad")
    await asyncio.wait_for(got.task, WITHIN_S)
    assert got.status >= 400
    assert got.headers[b"plait-durable"] == b"false"
    await mend(served)


async def chat(served: DurableServed, **more: Any) -> Exchange:
    exchange = await served.chat("Write", output="out", **more)
    await served.engine.answer("Write", "y")
    return exchange


VARIABLE = {"session_id": "s", "semantic_var_id": "bad", "error": "it is bad"}
GETS = {"session": "s", "external": ["x"], "gets": {"x": None}}
ROUTES: dict[str, Callable[[DurableServed], Awaitable[Exchange]]] = {
    "get": lambda served: served.get("x"),
    "get stream": lambda served: served.get("x", stream=True),
    "program": lambda served: served.send("/v1/programs", GETS),
    "program stream": lambda served: served.send("/v1/programs", {**GETS, "stream": True}),
    "chat": chat,
    "chat stream": lambda served: chat(served, stream=True),
    "submit": lambda served: served.submit("Write {{code}}", "code"),
    "value": lambda served: served.value("y", "1"),
    "failure": lambda served: served.send("/v1/variables", VARIABLE),
    "variable": lambda served: served.send("/v1/variables/s/x", method="GET"),
    "session": lambda served: served.send("/v1/sessions", {"session_id": "s", "objective": "latency"}),
    "state": lambda served: served.send("/v1/sessions/s", method="GET"),
    "close": lambda served: served.send("/v1/sessions/s/close"),
    "delete": lambda served: served.send("/v1/sessions/s", method="DELETE"),
}
"""A request of each kind whose answer tells of a session."""


async def lost(_stream: StreamKey) -> bool:
    return False


@pytest.mark.parametrize("route", ROUTES)
async def test_what_is_told_without_being_stored_says_so(
    served: DurableServed, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.value("x", "1")
    served.waits = False
    monkeypatch.setattr(served.durability, "committed", lost)
    exchange = await ROUTES[route](served)
    await asyncio.wait_for(exchange.task, WITHIN_S)
    assert exchange.status == 200
    is_marked = exchange.headers.get(b"plait-durable") == b"false"
    assert is_marked or b'"durable":false' in exchange.body or b": plait-durable=false" in exchange.body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_that_was_there_and_is_not_stored_says_so(
    served: DurableServed, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.send("/v1/variables", VARIABLE)
    served.waits = False
    monkeypatch.setattr(served.durability, "committed", lost)
    got = await served.get("bad", stream=stream)
    await asyncio.wait_for(got.task, WITHIN_S)
    assert (got.status, got.headers[b"plait-durable"]) == (424, b"false")
    assert "bad" in got.json["error"]["message"]


async def test_a_streamed_call_that_an_engine_refuses_is_answered_whole(
    served: DurableServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.value("x", "1")
    served.waits = False
    monkeypatch.setattr(served.durability, "committed", lost)
    exchange = await served.chat("Write", output="out", stream=True)
    await served.engine.refuse("Write")
    await asyncio.wait_for(exchange.task, WITHIN_S)
    assert (exchange.status, exchange.headers[b"plait-durable"]) == (400, b"false")
    assert exchange.json["error"]


@pytest.mark.parametrize("route", ROUTES)
async def test_nothing_is_told_while_the_store_cannot_be_reached(
    served: DurableServed, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = asyncio.Event()
    real = served.durability.committed

    async def away(stream: StreamKey) -> bool:
        if not may_go_on.is_set():
            raise UnreachableStoreError
        return await real(stream)

    await served.value("x", "the value")
    served.waits = False
    monkeypatch.setattr(served.durability, "committed", away)
    monkeypatch.setattr(recorded, "AGAIN_S", 0.001)
    exchange = await ROUTES[route](served)
    await asyncio.sleep(0.02)
    if exchange.task.done():
        assert exchange.refusal == (503, "store_failed")
    else:
        told = b"".join(message.get("body", b"") for message in exchange.messages)
        assert b"the value" not in told
        assert b"[DONE]" not in told
    may_go_on.set()
    await asyncio.wait_for(exchange.task, WITHIN_S)
    assert exchange.task.exception() is None


class Away:
    """A log that cannot be reached."""

    def __init__(self, error: PlaitError | None) -> None:
        self._error = error

    def check(self, *, is_whole: bool = False) -> None: ...

    def make(self, tenant: str, response_id: str) -> None: ...

    def append(self, changes: Sequence[Change]) -> None:
        pass

    async def committed(self, _stream: StreamKey) -> bool:
        if self._error is not None:
            raise self._error
        return False

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unix_s(self, now_s: float) -> float:
        return now_s


def kept_response(error: PlaitError | None, sent: list[Message]) -> KeptResponse:
    async def to_client(message: Message) -> None:
        sent.append(message)

    return KeptResponse(AsgiSink(to_client), StoredResponses(10_000, 60.0, Away(error)), "t", None, [])


@pytest.mark.parametrize("error", [None, UnreachableStoreError()])
async def test_a_whole_response_that_is_not_stored_comes_whole_and_says_so(error: PlaitError | None) -> None:
    sent = list[Message]()
    kept = kept_response(error, sent)
    await kept.send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await kept.send({"type": "http.response.body", "body": b'{"id": "r1", ', "more_body": True})
    assert not sent, "the head waits for what it has to say"
    await kept.send({"type": "http.response.body", "body": b'"output": []}'})
    head, body = sent
    assert (b"plait-durable", b"false") in head["headers"]
    assert json.loads(body["body"]) == {"id": "r1", "output": []}


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("error", [None, UnreachableStoreError()])
async def test_a_streamed_response_that_is_not_stored_says_so_in_its_last_event(
    error: PlaitError | None, end: bytes
) -> None:
    sent = list[Message]()
    kept = kept_response(error, sent)
    delta = b'event: response.output_text.delta\ndata: {"delta":"x"}' + end
    last = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r1","output":[]}}' + end
    await kept.send({"type": "http.response.start", "status": 200, "headers": STREAM})
    await kept.send({"type": "http.response.body", "body": delta + last})
    events = sent[1]["body"].split(end)
    assert events[0] + end == delta
    assert events[2] == b""
    marked = json.loads(events[1].partition(b"data:")[2])
    assert marked == {"type": "response.completed", "response": {"id": "r1", "output": []}, "durable": False}
