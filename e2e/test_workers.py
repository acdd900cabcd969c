"""`workers`: several processes on one port look as one gateway to clients, and end and begin again one by one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from e2e.server_process import NO_TLS, PLAIT, Server, eventually
from e2e.servers import Launcher
from tests.waiting import WITHIN_S

WORKERS = 3
CHAT = "/v1/chat/completions"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Server]:
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name) for name in ("a", "b")]
        store = tmp_path / "store" / "sessions.db"
        store.parent.mkdir(mode=0o700)
        server = launch.gateway(engines, server={"workers": WORKERS, "admin_key": "secret"}, store={"path": str(store)})
        for one in (*engines, server):
            one.start()
        for one in (*engines, server):
            one.wait_until_ready()
        eventually(lambda: server.metric("plait_engine_up") == WORKERS * len(engines))
        yield server


def processes(gateway: Server) -> list[int]:
    """The workers' processes, which are children of the one that was started."""
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def chat(text: str, **more: object) -> dict[str, object]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def up(gateway: Server) -> int:
    return round(gateway.metric("plait_worker_up"))


def test_each_worker_gets_calls_and_metrics_are_of_all(gateway: Server) -> None:
    for number in range(30):  # each over a connection of its own
        assert gateway.post(CHAT, json=chat(f"call {number}")).status_code == 200
    by_worker = [gateway.metric("plait_calls_total", worker=str(number)) for number in range(WORKERS)]
    assert sum(by_worker) == 30
    assert all(by_worker)


def test_connections_are_spread_evenly(gateway: Server) -> None:
    clients = [
        httpx.Client(base_url=gateway.url, trust_env=False, verify=NO_TLS, timeout=WITHIN_S) for _ in range(4 * WORKERS)
    ]
    try:
        for client in clients:
            assert client.post(CHAT, json=chat("hello")).status_code == 200
        by_worker = [gateway.metric("plait_calls_total", worker=str(number)) for number in range(WORKERS)]
        assert by_worker == [4] * WORKERS
    finally:
        for client in clients:
            client.close()


def test_a_session_is_the_same_from_every_connection(gateway: Server) -> None:
    await_sessions(gateway)
    for number in range(6):
        session = gateway.post("/v1/sessions", json={}).json()["id"]
        made = gateway.post(CHAT, json=chat("Write", plait={"session": session, "output": "a"}))
        assert made.status_code == 200, made.text
        used = gateway.post(CHAT, json=chat("Judge {{a}}", plait={"session": session, "inputs": ["a"]}))
        assert used.status_code == 200, used.text
        got = gateway.post("/v1/get", json={"session_id": session, "semantic_var_id": "a"}).json()
        assert got["value"] == made.json()["choices"][0]["message"]["content"], number
        assert gateway.request("DELETE", f"/v1/sessions/{session}").status_code == 200
        assert gateway.get(f"/v1/sessions/{session}").status_code == 410


def test_a_stored_response_is_continued_and_read_from_every_connection(gateway: Server) -> None:
    first = gateway.post("/v1/responses", json={"model": "demo", "input": "hello", "max_output_tokens": 16}).json()[
        "id"
    ]
    for _ in range(6):
        more = {"model": "demo", "input": "more", "previous_response_id": first, "max_output_tokens": 16}
        assert gateway.post("/v1/responses", json=more).status_code == 200
        assert gateway.get(f"/v1/responses/{first}").json()["id"] == first
    assert gateway.get("/v1/responses/resp_unknown").status_code == 404


def test_a_change_of_the_engines_is_made_in_all_workers(gateway: Server) -> None:
    key = {"authorization": "Bearer secret"}
    assert gateway.post("/admin/engines/b", json={"state": "draining"}, headers=key).status_code == 200
    for _ in range(9):
        assert gateway.get("/admin/engines/b", headers=key).json()["state"] == "draining"


def test_a_drain_waits_for_the_calls_of_all_workers(gateway: Server) -> None:
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(gateway.post, CHAT, json=chat(f"call {n}", max_tokens=200)) for n in range(6)]
        eventually(lambda: gateway.metric("plait_engine_outstanding_calls", engine="b") > 0)
        command = [str(PLAIT), "drain", "b", f"--url={gateway.url}", "--key=secret", "--wait"]
        drained = subprocess.run(command, capture_output=True, text=True, check=True)
        assert drained.stdout.endswith("No call is on b.\n")
        assert not gateway.metric("plait_engine_outstanding_calls", engine="b")
        assert {call.result().status_code for call in calls} == {200}


def test_what_only_peers_may_say_is_refused_from_clients(gateway: Server) -> None:
    for _ in range(4):
        refused = gateway.post(CHAT, json=chat("x"), headers={"plait-peer": "guessed 80"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "plait-peer")


def test_a_killed_worker_ends_only_its_own_streams_and_is_started_again(gateway: Server) -> None:
    with httpx.Client(base_url=gateway.url, trust_env=False, verify=NO_TLS, timeout=WITHIN_S) as client:
        streams = [
            client.send(
                client.build_request("POST", CHAT, json=chat(f"s{n}", stream=True, max_tokens=400)), stream=True
            )
            for n in range(12)
        ]
        killed = processes(gateway)[0]
        os.kill(killed, signal.SIGKILL)
        whole = [_is_whole(stream) for stream in streams]
    assert 0 < sum(whole) < len(whole), "each worker has some of them"
    eventually(lambda: killed not in processes(gateway) and len(processes(gateway)) == WORKERS)
    eventually(lambda: up(gateway) == WORKERS)
    for number in range(12):
        assert gateway.post(CHAT, json=chat(f"after {number}")).status_code == 200
    assert "a worker has ended" in gateway.log()


def test_sessions_of_a_killed_worker_are_there_once_it_is_back(gateway: Server) -> None:
    await_sessions(gateway)
    for number in range(6):
        given = {"session_id": f"s{number}", "semantic_var_id": "v", "value": f"value {number}"}
        assert gateway.post("/v1/variables", json=given).status_code == 200
    for pid in processes(gateway):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: up(gateway) == WORKERS)

    def values() -> list[object]:
        asked = [gateway.get(f"/v1/variables/s{number}/v").json() for number in range(6)]
        return [one.get("value") for one in asked]

    eventually(lambda: values() == [f"value {number}" for number in range(6)])


def test_workers_end_with_the_process_that_looks_after_them(gateway: Server) -> None:
    left = processes(gateway)
    gateway.kill()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    gateway.start()
    gateway.wait_until_ready()


def await_sessions(gateway: Server) -> None:
    """Wait until no worker reads the store any more, as one does that has just begun."""
    eventually(lambda: all(gateway.post("/v1/sessions", json={}).is_success for _ in range(4 * WORKERS)))


def _is_whole(stream: httpx.Response) -> bool:
    try:
        return stream.read().endswith(b"[DONE]\n\n")
    except httpx.TransportError:
        return False
    finally:
        stream.close()
