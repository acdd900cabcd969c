"""The door of the gateway's own routes: turns, what an answer counts, and the name of each request."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message, Receive, Scope, Send

from plait.backends.errors import PlaitError
from plait.gateway.api.own_routes import OwnRoutes
from plait.gateway.asgi import PART_BYTES, send_whole
from plait.gateway.calls.routes import CallRoutes
from plait.gateway.intake.open_bodies import OpenBodies

MOST_OPEN = 4 * PART_BYTES


class Door:
    """A door before one route, whose answer has `size` bytes. `reads`: whether the client reads."""

    def __init__(self, size: int) -> None:
        self.bodies = OpenBodies(10**6, MOST_OPEN)
        self.size = size
        self.reads = asyncio.Event()
        self.refused: list[str | None] = []
        self.app = OwnRoutes(
            self._answer, self.bodies, CallRoutes(), tenant_of=lambda _scope: "a", on_refused=self._refuse
        )

    async def _answer(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, 200, [], b"x" * self.size)

    def _refuse(self, _scope: Scope, error: PlaitError) -> None:
        self.refused.append(error.code)

    async def get(self, path: str, sent: list[Message]) -> None:
        async def receive() -> Message:
            return {"type": "http.request"}

        async def send(message: Message) -> None:
            sent.append(message)
            await self.reads.wait()

        await self.app({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)


def text(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


async def test_an_answer_is_sent_in_parts_and_counts_until_it_is_read() -> None:
    door, sent = Door(3 * PART_BYTES), list[Message]()
    task = asyncio.create_task(door.get("/v1/sessions/s", sent))
    await asyncio.sleep(0)
    assert (door.bodies.bytes_of("a"), door.bodies.requests_of("a")) == (3 * PART_BYTES, 1)
    door.reads.set()
    await task
    assert [len(message["body"]) for message in sent[1:]] == [PART_BYTES] * 3
    assert [message.get("more_body", False) for message in sent[1:]] == [True, True, False]
    assert (door.bodies.bytes_of("a"), door.bodies.requests_of("a")) == (0, 0)


async def test_unread_answers_of_a_key_are_bounded() -> None:
    door, first, second = Door(3 * PART_BYTES), list[Message](), list[Message]()
    task = asyncio.create_task(door.get("/v1/sessions/s", first))
    await asyncio.sleep(0)
    refused = asyncio.create_task(door.get("/v1/sessions/s", second))
    await asyncio.sleep(0)
    door.reads.set()
    await asyncio.gather(task, refused)
    assert second[0]["status"] == 429
    assert json.loads(text(second))["error"]["code"] == "too_many_open_bytes"
    assert door.refused == ["too_many_open_bytes"]
    assert (door.bodies.bytes_of("a"), door.bodies.requests_of("a")) == (0, 0)


async def test_every_answer_names_its_request() -> None:
    door, sent = Door(1), list[Message]()
    door.reads.set()
    await door.get("/v1/models", sent)
    assert [name for name, _ in sent[0]["headers"]].count(b"x-request-id") == 1


@pytest.mark.parametrize(("path", "waits"), [("/v1/models", True), ("/health", False), ("/metrics", False)])
async def test_only_tenants_wait_while_the_loop_is_busy(path: str, waits: bool) -> None:
    door, sent, taken = Door(1), list[Message](), list[str]()

    async def take(tenant: str) -> None:
        taken.append(tenant)

    door.bodies.turns.take = take  # type: ignore[method-assign, assignment]
    door.reads.set()
    await door.get(path, sent)
    assert taken == ["a"] * waits
    assert sent[0]["status"] == 200


async def test_an_answer_that_was_refused_is_not_refused_again() -> None:
    door, sent = Door(MOST_OPEN + 1), list[Message]()
    door.reads.set()
    whole = door._answer

    async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
        await whole(scope, receive, send)
        raise PlaitError("the other gateway is gone")

    door.app._app = breaks_off
    await door.get("/v1/sessions/s", sent)
    assert [message["status"] for message in sent if "status" in message] == [429]
    assert door.refused == ["too_many_open_bytes"]
