"""Requests that are made to hurt: each gets an error object that says what to do, and nobody else notices."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.faults.hostile_requests import CASES, GET, LARGE_TEMPLATE, LOOPS, Case, chat, is_whole
from e2e.server_process import NO_TLS, Server
from e2e.servers import Fleet, Launcher
from tests.waiting import SLOWNESS, WITHIN_S

HEALTH_S = 0.5
"""Of CPU time, which the gateway may have used before it answers others."""
KEYS = ("one", "two")
LIMITS: dict[str, Any] = {
    "max_connections": 64,
    "header_timeout_s": SLOWNESS,
    "body_timeout_s": SLOWNESS,
    "trust_request_chat_template": True,
    "api_keys": list(KEYS),
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A gateway that takes templates, over an engine with a short context and one with a long one.

    Its native encoder has proved nothing on this machine, so that a long prompt takes its time.
    """
    folder = tmp_path_factory.mktemp("hostile")
    with Launcher(folder) as launch, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        engines = [launch.engine("small-1", model="small", options=["--max-context-tokens", "512"])]
        engines.append(launch.engine("demo-1"))
        fleet = Fleet(
            launch.gateway(engines, models=["demo", "small"], server=LIMITS),
            {engine.name: engine for engine in engines},
        )
        fleet.start()
        post(fleet.gateway, "one", chat(chat_template="{{ messages[0].content }}"))  # its process has started
        yield fleet.gateway


@contextmanager
def healthy(gateway: Server) -> Iterator[list[float]]:
    """Ask for the health all the time; the gateway may use `HEALTH_S` of CPU time meanwhile."""
    over, times_s = threading.Event(), list[float]()

    def ask() -> None:
        with httpx.Client(trust_env=False, verify=NO_TLS, timeout=WITHIN_S) as client:
            while True:
                before_s = cpu_s(gateway)
                assert client.get(f"{gateway.url}/health").status_code == 200
                times_s.append(cpu_s(gateway) - before_s)
                if over.wait(0.01):
                    return

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield times_s
        finally:
            over.set()
    asked.result()
    assert max(times_s) < HEALTH_S, "the gateway stood still"


def sent(gateway: Server, pieces: Sequence[bytes]) -> bytes:
    """The answer to raw bytes, until the connection closes or the answer is whole."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=WITHIN_S) as client:
        for piece in pieces:
            try:
                client.sendall(piece)
            except ConnectionError:
                break
        answer = b""
        while not is_whole(answer) and (more := client.recv(65_536)):
            answer += more
    return answer


def post(gateway: Server, key: str, body: bytes) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return gateway.post("/v1/chat/completions", content=body, headers=headers)


def cpu_s(gateway: Server) -> float:
    """The CPU time that the gateway's process has used."""
    fields = Path(f"/proc/{gateway.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(gateway: Server) -> int:
    """What the gateway's process has in memory."""
    assert gateway._process is not None
    status = Path(f"/proc/{gateway._process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_request_is_answered_in_openais_shape(gateway: Server, case: Case) -> None:
    before = gateway.metric("plait_refusals_total")
    with healthy(gateway):
        head, _, body = sent(gateway, case.pieces).partition(b"\r\n\r\n")
    status, kind = int(head.split()[1]), [line for line in head.splitlines() if line.startswith(b"content-type")]
    assert (status, kind) == (case.status, [b"content-type: application/json"])
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    if case.name != "deep in a session":
        assert (error["code"], error["param"]) == (case.code, case.param)
    assert 10 < len(error["message"]) < 1_500
    assert gateway.metric("plait_refusals_total") == before + 1


@pytest.mark.parametrize("template", [LOOPS, LARGE_TEMPLATE], ids=["loops", "a large text"])
def test_templates_of_clients_cost_nobody_else_anything(gateway: Server, template: str) -> None:
    post(gateway, "one", chat())
    memory = memory_bytes(gateway)
    with healthy(gateway), ThreadPoolExecutor(4) as pool:
        attack = [pool.submit(post, gateway, "one", chat(chat_template=template)) for _ in range(4)]
        assert post(gateway, "two", chat("x" * 20_000)).status_code == 200
        has_waited = all(answer.done() for answer in attack)
        assert {answer.result().status_code for answer in attack} == {400}
    grown_bytes = memory_bytes(gateway) - memory
    assert template is not LOOPS or not has_waited, "the other tenant's prompt waited for some seconds"
    assert grown_bytes < 16 * 2**20, f"the gateway grew by {grown_bytes >> 20} MiB"


def test_connections_are_bounded_and_answered(launch: Launcher) -> None:
    engine = launch.engine("demo-1")
    gateway = launch.gateway([engine], server={**LIMITS, "api_keys": [], "header_timeout_s": WITHIN_S})
    Fleet(gateway, {engine.name: engine}).start()
    held = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(LIMITS["max_connections"])]
    for client in held:
        client.sendall(GET)
    answer = sent(gateway, [GET + b"\r\n"])
    for client in held:
        client.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
    assert b"retry-after: 1" in answer


def test_a_dozen_long_prompts_do_not_delay_another_tenants(gateway: Server) -> None:
    body = chat("A line of a long prompt, with words.\n" * 55_000)
    assert len(body) > 2_000_000
    with ThreadPoolExecutor(13) as pool, healthy(gateway):
        long = [pool.submit(post, gateway, "one", body) for _ in range(12)]
        time.sleep(0.5)
        answered = 0
        while not all(answer.done() for answer in long):
            assert post(gateway, "two", chat("another prompt " * 1_400)).status_code == 200
            answered += not all(answer.done() for answer in long)
            time.sleep(0.05)
    assert answered >= 5, "none if prompts were tokenized in the order in which they come"
