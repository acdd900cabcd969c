"""Clients that do not read their answers: the gateway does not grow, others notice nothing, and they are dropped."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from e2e.stub_engine import Script, StubEngine
from tests.waiting import SLOWNESS

CLIENTS = 4
STREAM_BYTES = 200 * 2**20
"""Of each answer. The kernel's buffers hold some megabytes of it."""
TIMEOUT_S = 3.0 * SLOWNESS
GROWTH_BYTES = 32 * 2**20
"""Each client may lag by 1 MiB. A repeatable answer also keeps what the kernel's buffers took, some 5 MiB."""


def event(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode()


LONG = event("x" * 64 * 1024)
ENDLESS = Script([LONG] * (STREAM_BYTES // len(LONG)) + [event("", "stop"), b"data: [DONE]\n\n"])


@pytest.fixture
def endless() -> Iterator[StubEngine]:
    with StubEngine("endless") as engine:
        engine.script = ENDLESS
        yield engine


def slow_fleet(launch: Launcher, endless: StubEngine, timeout_s: float = TIMEOUT_S) -> Fleet:
    """A gateway over the endless engine and a real one. It would soon take a silent engine for a hung one."""
    demo = launch.engine("demo-1")
    gateway = launch.gateway(
        [{"name": "endless", "url": endless.url, "models": ["endless"]}, demo],
        models=["demo", "endless"],
        server={"slow_client_timeout_s": timeout_s},
        upstream={"hang_timeout_s": 0.5 * SLOWNESS},
    )
    for server in (demo, gateway):
        server.start()
        server.wait_until_ready()
    eventually(lambda: gateway.metric("plait_engine_up") == 2)
    return Fleet(gateway, {"demo-1": demo})


def unread(gateway: Server, path: str, body: dict[str, Any], **headers: str) -> socket.socket:
    """A request whose answer nobody reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    connection.connect(("127.0.0.1", gateway.port))
    raw = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {len(raw)}"]
    head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + raw)
    return connection


CHAT = {"model": "endless", "stream": True, "messages": [{"role": "user", "content": "Go on."}]}


def plain(gateway: Server, number: int) -> socket.socket:
    return unread(gateway, "/v1/chat/completions", CHAT)


def chained(gateway: Server, number: int) -> socket.socket:
    """A call that could be repeated."""
    return unread(gateway, "/v1/chat/completions", CHAT, plait_session=f"s{number}", plait_output="text")


def last(gateway: Server, number: int) -> socket.socket:
    """A call with an input, at the end of its program."""
    value = {"session_id": f"s{number}", "semantic_var_id": "x", "value": "1"}
    assert gateway.post("/v1/variables", json=value).status_code == 200
    return unread(gateway, "/v1/chat/completions", CHAT, plait_session=f"s{number}", plait_inputs="x")


def ask(gateway: Server) -> None:
    """Another client's short call."""
    body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    assert gateway.post("/v1/chat/completions", json=body).status_code == 200


def grown(gateway: Server, is_over: Callable[[], bool]) -> int:
    """The most bytes by which the gateway grew until it `is_over`, while another client asks and is answered."""
    before, most, answered = gateway.resident_bytes, 0, 0
    while not is_over():
        ask(gateway)
        answered += not is_over()
        time.sleep(0.05)
        most = max(most, gateway.resident_bytes - before)
    assert answered >= 3, "its calls waited for those that nobody reads"
    return most


@pytest.mark.parametrize("request_of", [plain, chained, last])
def test_who_does_not_read_is_waited_for_and_then_dropped(
    launch: Launcher, endless: StubEngine, request_of: Any
) -> None:
    gateway = slow_fleet(launch, endless).gateway
    ask(gateway)
    with ExitStack() as open_:
        for number in range(CLIENTS):
            open_.enter_context(request_of(gateway, number))
        eventually(lambda: len(endless.received) == CLIENTS)

        def is_dropped() -> bool:
            recorded_bytes = gateway.metric("plait_recorded_answer_bytes")
            outstanding = gateway.metric("plait_engine_outstanding_calls", engine="endless")
            dropped = gateway.metric("plait_slow_clients_dropped_total") > 0
            assert dropped or outstanding == CLIENTS
            assert recorded_bytes < GROWTH_BYTES
            return dropped

        assert grown(gateway, is_dropped) < GROWTH_BYTES
        eventually(lambda: gateway.metric("plait_slow_clients_dropped_total") == CLIENTS)
        eventually(lambda: gateway.metric("plait_engine_outstanding_calls") == 0)
    assert gateway.metric("plait_recorded_answer_bytes") == 0
    assert gateway.metric("plait_engine_health_changes_total", cause="hung") == 0
    assert gateway.metric("plait_calls_total", outcome="client_gone") == CLIENTS
    assert len(endless.received) == CLIENTS, "no call was sent again"


def test_a_get_that_nobody_reads_queues_nothing(launch: Launcher, endless: StubEngine) -> None:
    """The text is given up at the limit of a value, and the getters get an error that they do not read."""
    gateway = slow_fleet(launch, endless).gateway
    ask(gateway)
    prompt = {"session_id": "s", "model": "endless", "prompt": "Go on.{{text}}"}
    assert gateway.post("/v1/sessions", json={"session_id": "s"}).status_code == 200
    with ExitStack() as open_:
        for _ in range(CLIENTS):
            body = {"session_id": "s", "semantic_var_id": "text", "stream": True}
            open_.enter_context(unread(gateway, "/v1/get", body))
        placeholders = [{"name": "text", "in_out": True}]
        assert gateway.post("/v1/submit", json={**prompt, "placeholders": placeholders}).status_code == 200
        eventually(lambda: len(endless.received) == 1)
        ends_s = time.monotonic() + 2.0 * SLOWNESS
        assert grown(gateway, lambda: time.monotonic() > ends_s) < GROWTH_BYTES
        assert gateway.metric("plait_held_bytes") <= 1.1 * 2**20


def test_who_reads_slowly_gets_everything(launch: Launcher, endless: StubEngine) -> None:
    """It takes longer than the time-out, and the engine is not blamed for it."""
    pieces = [LONG] * 200
    endless.script = Script([*pieces, event("", "stop"), b"data: [DONE]\n\n"])
    gateway = slow_fleet(launch, endless).gateway
    began_s = time.monotonic()
    with last(gateway, 0) as connection:
        read = bytearray()
        while b"[DONE]" not in read[-200:]:
            piece = connection.recv(64 * 1024)
            assert piece, "the gateway has dropped a client that reads"
            read += piece
            time.sleep(0.01 * SLOWNESS)
    assert time.monotonic() - began_s > TIMEOUT_S
    assert read.count(b"finish_reason") == len(pieces) + 1
    assert gateway.metric("plait_slow_clients_dropped_total") == 0
    assert gateway.metric("plait_engine_health_changes_total", cause="hung") == 0
