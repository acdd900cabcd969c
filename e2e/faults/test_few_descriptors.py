"""A gateway whose system gives it few file descriptors: it says so, and connections too many are told."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, suppress

from e2e.faults.hostile_requests import GET, chat, is_whole
from e2e.servers import Fleet, Launcher
from tests.waiting import WITHIN_S

DESCRIPTORS, ALLOWED, TOLD = 256, 32, 16


def answer(client: socket.socket) -> bytes:
    """All that comes until the answer is whole or the connection closes."""
    received = b""
    with suppress(ConnectionResetError):
        while not is_whole(received) and (more := client.recv(65_536)):
            received += more
    return received


def test_connections_too_many_are_told_and_calls_go_on(launch: Launcher) -> None:
    engine = launch.engine("demo-1")
    gateway = launch.gateway([engine], server={"header_timeout_s": WITHIN_S})
    gateway._command = ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", *gateway._command]
    Fleet(gateway, {engine.name: engine}).start()
    (line,) = (json.loads(line) for line in gateway.log().splitlines() if "ulimit -n" in line)
    assert (line["level"], line["descriptors"], line["connections"]) == ("warning", DESCRIPTORS, ALLOWED)
    with ExitStack() as stack:
        address = ("127.0.0.1", gateway.port)
        clients = []
        for _ in range(100):
            clients.append(stack.enter_context(socket.create_connection(address, timeout=WITHIN_S)))
            clients[-1].sendall(GET)  # which is not whole: an idle connection would be closed for the next
        answers = [answer(client) for client in clients[ALLOWED:]]
        statuses = [received.partition(b" ")[2][:3] for received in answers]
        assert statuses == [b"503"] * TOLD + [b""] * (100 - ALLOWED - TOLD)
        assert b"too_many_connections" in answers[0]
        for client in clients[:ALLOWED]:
            client.sendall(b"\r\n")
        assert {answer(client).split()[1] for client in clients[:ALLOWED]} == {b"200"}
        body = chat()
        for client in clients[:ALLOWED]:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
        answers = [answer(client) for client in clients[:ALLOWED]]
        served = [received for received in answers if received.split()[1] == b"200"]
        assert len(served) == ALLOWED * 7 // 8, "each call has a connection to its engine"
        assert all(b"too_many_open_requests" in received for received in answers if received not in served)
    assert gateway.post("/v1/chat/completions", content=body).status_code == 200
    lines = [json.loads(line) for line in gateway.log().splitlines() if "connections refused" in line]
    assert [(line["level"], line["too_few"]) for line in lines] == [("warning", "max_connections")]
