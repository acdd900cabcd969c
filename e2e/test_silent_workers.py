"""Workers that are silent, that are started again, and that end: clients and operators notice as little as can be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from e2e.test_workers import processes, up
from tests.waiting import WITHIN_S

WORKERS: Final = 3
KEY: Final = {"authorization": "Bearer secret"}
CONNECTIONS: Final = 500


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Server]:
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name) for name in ("a", "b")]
        options = {"workers": WORKERS, "admin_key": "secret", "drain_delay_s": 0.0}
        server = launch.gateway(engines, server=options)
        for one in (*engines, server):
            one.start()
        for one in (*engines, server):
            one.wait_until_ready()
        eventually(lambda: server.metric("plait_engine_up") == WORKERS * len(engines))
        yield server


@pytest.mark.nightly
def test_a_silent_worker_blinds_nobody_and_is_replaced(gateway: Server) -> None:
    """It is replaced after some ten seconds. Answers that waited for it would come after that."""
    other, victim = own_urls(gateway)["0"], pid_of(gateway, "1")
    os.kill(victim, signal.SIGSTOP)
    asked = (("GET", "/metrics"), ("GET", "/admin/engines"), ("POST", "/admin/engines/b"))
    answered = Counter[tuple[str, str]]()

    def is_replaced() -> bool:
        for one in asked:
            assert _once(other, *one, json={"state": "active"}).status_code == 200
            answered[one] += victim in processes(gateway)
        return victim not in processes(gateway)

    eventually(is_replaced)
    eventually(lambda: up(gateway) == WORKERS)
    assert all(answered[one] for one in asked), answered
    assert "a worker is silent and is ended" in gateway.log()


def events(gateway: Server, event: str) -> dict[str, dict[str, Any]]:
    """The latest line of each worker in the log that tells of this event."""
    lines = [json.loads(line) for line in gateway.log().splitlines() if f'"{event}' in line]
    return {line["worker"]: line for line in lines if "worker" in line}


def own_urls(gateway: Server) -> dict[str, str]:
    """The address of each worker, which the system gives no other worker's connections."""
    return {worker: line["urls"][-1] for worker, line in events(gateway, "listening").items()}


def pid_of(gateway: Server, worker: str) -> int:
    return int(events(gateway, "Started server process")[worker]["event"].split("[")[1].rstrip("]"))


def _once(url: str, method: str, path: str, json: object = None) -> httpx.Response:
    """The answer over a connection of its own."""
    body = json if method == "POST" else None
    return httpx.request(method, url + path, headers=KEY, json=body, trust_env=False, timeout=WITHIN_S)


def test_a_worker_that_is_started_again_has_the_drains_and_no_valid_file_is_needed(
    gateway: Server, tmp_path: Path
) -> None:
    assert gateway.post("/admin/engines/b", json={"state": "draining"}, headers=KEY).status_code == 200
    added = {"url": "http://127.0.0.1:9", "name": "late"}
    assert gateway.post("/admin/engines", json=added, headers=KEY).status_code == 201
    (file,) = tmp_path.glob("**/*.toml")
    file.write_text("[server\n" + file.read_text())
    victim = processes(gateway)[0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in processes(gateway))
    eventually(lambda: up(gateway) == WORKERS)
    for _ in range(4 * WORKERS):
        engines = {one["name"]: one["state"] for one in _once(gateway.url, "GET", "/admin/engines").json()["data"]}
        assert engines == {"a": "active", "b": "draining", "late": "active"}
    assert gateway.running


async def test_no_connection_is_reset_at_sigterm(gateway: Server) -> None:
    """They came before the signal, but were not accepted: the workers were busy."""
    pids = processes(gateway)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    clients = []
    for _ in range(CONNECTIONS):
        client = socket.create_connection(("127.0.0.1", gateway.port))
        client.sendall(request)
        clients.append(client)
    gateway.terminate()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)

    def answer(client: socket.socket) -> bytes:
        client.settimeout(WITHIN_S)
        try:
            return client.recv(15)
        except OSError as error:
            return repr(error).encode()
        finally:
            client.close()

    answers = await asyncio.to_thread(lambda: list(map(answer, clients)))
    assert set(answers) == {b"HTTP/1.1 200 OK"}
