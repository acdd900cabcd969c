"""Each request to a call's route ends in one line `call` and counts once, whatever ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
import uvicorn
from structlog.testing import capture_logs

from plait.gateway.app import Gateway
from plait.gateway.config.file import parse_config
from plait.gateway.server.connection import ClientBounds
from plait.gateway.server.http_server import new_config
from plait.gateway.server.request_bounds import RequestLimits
from tests.gateway.exposed import samples

CHAT = "/v1/chat/completions"
SECRET = "the words of a prompt"
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": SECRET}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
}
LIMITS = RequestLimits(header_timeout_s=1.0, body_timeout_s=0.3)


class Served:
    """A gateway on a port, with one engine, which says nothing while its `answer` is None."""

    def __init__(self) -> None:
        self.answer: tuple[int, dict[str, Any]] | None = (200, ANSWER)
        self.asked = asyncio.Event()
        self.gateway: Gateway
        self.port = 0

    async def engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(lengths[0].split(b":")[1]))
        self.asked.set()
        if self.answer is None:
            await reader.read()
        else:
            status, fields = self.answer
            body = json.dumps(fields).encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n" % status)
            writer.write(b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        writer.close()

    async def send(self, data: bytes, *, answered: bool = True) -> bytes:
        """Send a request on a connection of its own. Without `answered`, the client goes once it is under way."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        got = b""
        if answered:
            got = await asyncio.wait_for(reader.read(), 10.0)
        else:
            await asyncio.sleep(0.1)
        writer.close()
        return got

    @property
    def counted(self) -> int:
        found = samples(self.gateway._registry)
        return round(sum(count for name, count in found.items() if name.startswith("plait_tenant_calls_total{")))

    @property
    def refusals(self) -> list[str]:
        found = samples(self.gateway._registry)
        return [
            name
            for name, count in found.items()
            if name.startswith("plait_refusals_total{")
            for _ in range(round(count))
        ]


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    made = Served()
    engine = await asyncio.start_server(made.engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    sections = {
        "engines": [{"name": "a", "url": url}],
        "server": {"api_keys": ["one"], "max_body_bytes": 100_000},
        "sessions": {"gone_grace_s": 0.0},
    }
    made.gateway = gateway = Gateway(parse_config(sections, "test"))
    gateway.router.health.answered("a", {"m": None})
    bounds = ClientBounds(LIMITS, gateway.refusals.unread)
    server = uvicorn.Server(new_config(gateway.app, bounds, port=0, lifespan="off", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server._serve())  # `serve` would take the signals of the test run
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    made.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.should_exit = True
        await task
        engine.close()


def request(
    fields: dict[str, Any] | bytes | None = None,
    *headers: str,
    method: str = "POST",
    path: str = CHAT,
    key: str = "one",
    length: int | None = None,
) -> bytes:
    """A request with these fields beside the usual ones, or with this body, perhaps of another length than it says."""
    given = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
    body = fields if isinstance(fields, bytes) else json.dumps({**given, **(fields or {})}).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"authorization: Bearer {key}", *headers]
    lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def answered(made: Served) -> None:
    await made.send(request())


async def refused_by_the_engine(made: Served) -> None:
    made.answer = (422, {"error": {"message": f"I do not like {SECRET}", "type": "x"}})
    await made.send(request())


async def failed_by_the_engine(made: Served) -> None:
    made.answer = (503, {"error": {"message": f"I fail at {SECRET}", "type": "x"}})
    await made.send(request())


async def no_engine(made: Served) -> None:
    made.gateway.router.health.unreachable("a")
    await made.send(request())


async def gone_while_waiting(made: Served) -> None:
    made.answer = None
    await made.send(request(), answered=False)


async def cut(made: Served, data: bytes) -> None:
    made.answer = None
    task = asyncio.create_task(made.send(data))
    await asyncio.sleep(0.1)
    made.gateway.cut()
    assert b"503" in (await task).split(b"\r\n")[0]


async def defective(made: Served, data: bytes) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    setattr(made.gateway.router, "select", broken)  # noqa: B010 - a type checker refuses to assign a method
    setattr(made.gateway.router, "book", broken)  # noqa: B010
    assert b"500" in (await made.send(data)).split(b"\r\n")[0]


async def defective_key_ring(made: Served) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("a defect")

    setattr(made.gateway._keys, "check", broken)  # noqa: B010
    await made.send(request())


async def input_failed(made: Served) -> None:
    await made.send(request({"messages": 3}, "plait-session: s", "plait-output: x"))
    await made.send(request(None, "plait-session: s", "plait-inputs: x"))


LONG = b" " * 20_000
CHAINED = ("plait-session: s", "plait-output: y")
IN_PROGRAM = ("plait-session: s", "plait-inputs: x")
Line = tuple[int, str | None, str, str, str]
OK: Line = (200, None, "ok", "m", CHAT)


def plain(data: bytes, *, is_answered: bool = True) -> Callable[[Served], Awaitable[object]]:
    return lambda made: made.send(data, answered=is_answered)


def of_cut(data: bytes) -> Callable[[Served], Awaitable[object]]:
    return lambda made: cut(made, data)


def of_defect(data: bytes) -> Callable[[Served], Awaitable[object]]:
    return lambda made: defective(made, data)


CASES: dict[str, tuple[Callable[[Served], Awaitable[object]], list[Line]]] = {
    "answered": (answered, [OK]),
    "answered in a task": (plain(request({"plait": {}})), [OK]),
    "a translated call": (
        plain(request({"max_tokens": 5}, path="/v1/messages")),
        [(200, None, "ok", "m", CHAT)],
    ),
    "refused by the engine": (refused_by_the_engine, [(422, None, "refused", "m", CHAT)]),
    "failed by the engine": (failed_by_the_engine, [(503, "engine_error", "no_engine", "m", CHAT)]),
    "no engine": (no_engine, [(503, "no_engine_available", "no_engine", "m", CHAT)]),
    "a wrong key": (plain(request(key="two")), [(401, "invalid_api_key", "refused", "", CHAT)]),
    "a wrong method": (plain(request(method="GET")), [(405, "method_not_allowed", "refused", "", CHAT)]),
    "too long by its head": (plain(request(b"", length=10**6)), [(413, "body_too_large", "refused", "", CHAT)]),
    "no JSON": (plain(request(b"{")), [(400, "invalid_json", "refused", "", CHAT)]),
    "an unknown model": (plain(request({"model": SECRET})), [(404, "model_not_found", "refused", "", CHAT)]),
    "a wrong field": (plain(request({"messages": SECRET})), [(400, "invalid_request_error", "refused", "m", CHAT)]),
    "a wrong field, in a task": (
        plain(request({"messages": SECRET, "plait": {}})),
        [(400, "invalid_request_error", "refused", "m", CHAT)],
    ),
    "a wrong field of another route": (
        plain(request({"plait": {"inputs": ["a"]}}, path="/v1/embeddings")),
        [(400, "invalid_request_error", "refused", "m", "/v1/embeddings")],
    ),
    "gone while an engine has it": (gone_while_waiting, [(499, None, "client_gone", "m", CHAT)]),
    "gone while its body comes": (
        plain(request(LONG, length=50_000), is_answered=False),
        [(499, None, "client_gone", "", CHAT)],
    ),
    "a long body that does not come": (
        plain(request(LONG, length=50_000)),
        [(408, "request_timeout", "refused", "", CHAT)],
    ),
    "a short body that does not come": (
        plain(request(b"{", length=50)),
        [(408, "request_timeout", "refused", "", CHAT)],
    ),
    "cut while an engine has it": (of_cut(request()), [(503, "gateway_stopping", "refused", "m", CHAT)]),
    "cut in a task": (of_cut(request({"plait": {}})), [(503, "gateway_stopping", "refused", "m", CHAT)]),
    "cut while its body comes": (
        of_cut(request(LONG, length=50_000)),
        [(503, "gateway_stopping", "refused", "", CHAT)],
    ),
    "cut while it waits for an input": (
        of_cut(request(None, *IN_PROGRAM)),
        [(503, "gateway_stopping", "refused", "m", CHAT)],
    ),
    "a defect": (of_defect(request()), [(500, "internal_error", "defect", "m", CHAT)]),
    "a defect in a task": (of_defect(request({"plait": {}})), [(500, "internal_error", "defect", "m", CHAT)]),
    "a defect before it is read": (defective_key_ring, [(500, "internal_error", "defect", "", CHAT)]),
    "a chained call": (plain(request(None, *CHAINED)), [OK]),
    "a chained call with a wrong field": (
        plain(request({"n": 2}, *CHAINED)),
        [(400, "invalid_request_error", "refused", "m", CHAT)],
    ),
    "gone while it waits for an input": (
        plain(request(None, *IN_PROGRAM), is_answered=False),
        [(499, None, "client_gone", "m", CHAT)],
    ),
    "an input that failed": (
        input_failed,
        [(400, "invalid_request_error", "refused", "m", CHAT), (424, "input_failed", "refused", "m", CHAT)],
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_request_ends_in_one_line_and_counts_once(case: str) -> None:
    make, expected = CASES[case]
    structlog.reset_defaults()
    with capture_logs() as logs:
        async with serving() as made:
            await make(made)
            await asyncio.sleep(0.1)
            counted, refusals = made.counted, made.refusals
    lines = [line for line in logs if line["event"] == "call"]
    found = [(line["status"], line["code"], line["outcome"], line["model"], line["path"]) for line in lines]
    assert found == expected
    assert counted == len(expected)
    assert len(refusals) == sum(code is not None for _, code, *_ in expected)
    assert all(f'path="{line[4]}"' in name for line, name in zip([e for e in expected if e[1]], refusals, strict=True))
    assert not [line for line in logs if line["event"] in {"refused", "client gone", "request refused"}]
    of_calls = [line for line in logs if line["event"] != "defect"]
    assert SECRET not in repr(of_calls)
    assert all((line["tenant"] == "") == (case in {"a wrong key", "a defect before it is read"}) for line in lines)


async def test_a_request_that_repeats_a_call_has_a_line_of_its_own() -> None:
    with capture_logs() as logs:
        async with serving() as made:
            await made.send(request(None, *CHAINED))
            await made.send(request(None, *CHAINED))
            counted = made.counted
    lines = [line for line in logs if line["event"] == "call"]
    assert [(line["status"], line["outcome"]) for line in lines] == [(200, "ok"), (200, "ok")]
    assert (len({line["request_id"] for line in lines}), counted) == (2, 2)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"no HTTP\r\n\r\n", (400, "invalid_http", None)),
        (request(path="/v1/nothing"), (404, "not_found", "/v1/nothing")),
        (request(path="/v1/get"), (400, "invalid_request_error", "/v1/get")),
    ],
)
async def test_a_request_that_is_for_no_calls_route_has_another_line(
    data: bytes, line: tuple[int, str, str | None]
) -> None:
    with capture_logs() as logs:
        async with serving() as made:
            await made.send(data)
            (refusal,), counted = made.refusals, made.counted
    found = [(entry["event"], entry["status"], entry["code"], entry["path"]) for entry in logs if "code" in entry]
    assert found == [("request refused", *line)]
    assert ('path=""' in refusal, counted) == (True, 0)
