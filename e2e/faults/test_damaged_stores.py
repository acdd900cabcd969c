"""Stores that live: a failing call fills no disk, a flipped bit costs one session, a vanished file is no new store."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from e2e.rolling_load import chat
from e2e.server_process import NO_TLS, Server, eventually
from e2e.servers import Launcher
from tests.waiting import WITHIN_S

USER: Final = "u" * 60_000
"""A field of each request that no engine has to read."""

MOST_BYTES: Final = 5 * 2**20


@contextmanager
def served(launch: Launcher, path: Path) -> Iterator[Server]:
    """A gateway with a store over an embedded engine."""
    engine = launch.engine("a", time_scale=1000)
    gateway = launch.gateway([engine], store={"path": str(path)})
    engine.start()
    engine.wait_until_ready()
    start(gateway)
    yield gateway
    gateway.stop()


def failing(http: httpx.Client, session: str) -> int:
    """The status of a call whose text is no integer."""
    headers = {"plait-session": session, "plait-output": "number; transform=integer"}
    body = {**chat("Hello", 4), "stream": False, "user": USER}
    return http.post("/v1/chat/completions", json=body, headers=headers).status_code


def client(gateway: Server) -> httpx.Client:
    return httpx.Client(base_url=gateway.url, trust_env=False, verify=NO_TLS, timeout=WITHIN_S)


def start(gateway: Server) -> None:
    """Start it, and wait until its sessions can be used."""
    gateway.start()
    gateway.wait_until_ready()
    eventually(lambda: gateway.get("/v1/sessions/none").status_code == 404)


def set_value(gateway: Server, session: str, value: str) -> None:
    body = {"session_id": session, "semantic_var_id": "task", "value": value}
    assert gateway.post("/v1/variables", json=body).status_code == 200


def value_of(gateway: Server, session: str) -> Any:
    got = gateway.post("/v1/get", json={"session_id": session, "semantic_var_id": "task"})
    return got.json().get("value")


def size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.iterdir())


@pytest.mark.parametrize("calls", [100, pytest.param(1500, marks=pytest.mark.nightly)])
def test_a_call_that_fails_in_a_loop_fills_no_disk(launch: Launcher, tmp_path: Path, calls: int) -> None:
    path = tmp_path / "store" / "sessions.db"
    with served(launch, path) as gateway:
        set_value(gateway, "s", "a snake game")
        with client(gateway) as http:
            statuses = [failing(http, "s") for _ in range(calls)]
        assert set(statuses) == {200}
        gateway.stop()
        assert size_bytes(path) <= MOST_BYTES
        assert calls * len(USER) > MOST_BYTES, "it would have been more"
        start(gateway)
        assert value_of(gateway, "s") == "a snake game"


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.nightly)])
def test_a_kill_while_a_log_is_rewritten_leaves_the_old_or_the_new(
    launch: Launcher, tmp_path: Path, kills: int
) -> None:
    path, rng = tmp_path / "store" / "sessions.db", random.Random(kills)
    with served(launch, path) as gateway, ThreadPoolExecutor(1) as pool:
        for number in range(kills):
            set_value(gateway, f"s{number}", f"value {number}")

            def loop(session: str = f"s{number}", port: Server = gateway) -> None:
                with client(port) as http, suppress(httpx.HTTPError):
                    while failing(http, session):
                        pass

            looping = pool.submit(loop)
            time.sleep(0.3 + rng.random())
            gateway.kill()
            looping.result()
            start(gateway)
            assert [value_of(gateway, f"s{one}") for one in range(number + 1)] == [
                f"value {one}" for one in range(number + 1)
            ]
        assert gateway.metric("plait_store_damage_total") == 0


def test_one_flipped_bit_costs_one_session(launch: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "store" / "sessions.db"
    with served(launch, path) as gateway:
        for number in range(20):
            set_value(gateway, f"s{number}", f"value {number} " * 100)
        gateway.stop()
        content = bytearray(path.read_bytes())
        content[content.rindex(b"value 7 value 7")] ^= 1
        path.write_bytes(content)
        start(gateway)
        found = [gateway.get(f"/v1/sessions/s{number}").status_code for number in range(20)]
        assert found == [404 if number == 7 else 200 for number in range(20)]
        assert value_of(gateway, "s8") == "value 8 " * 100
        assert gateway.metric("plait_store_damage_total", kind="stream") == 1
        assert "a stream of the store cannot be read: it was set aside" in gateway.log()


def test_a_malformed_store_is_refused_until_a_copy_is_put_back(launch: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "store" / "sessions.db"
    with served(launch, path) as gateway:
        for number in range(5):
            set_value(gateway, f"s{number}", f"value {number} " * 1000)
        gateway.stop()
        kept = path.read_bytes()
        malformed = kept[:4096] + bytes(4096) + kept[8192:]
        path.write_bytes(malformed)
        gateway.start()
        gateway.wait_until_ready()
        eventually(lambda: "is malformed" in gateway.log())
        assert gateway.get("/v1/sessions/s0").status_code == 503
        assert path.read_bytes() == malformed
        path.write_bytes(kept)
        eventually(lambda: value_of(gateway, "s0") == "value 0 " * 1000)


def test_a_store_that_has_vanished_keeps_the_gateway_from_starting(launch: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "store" / "sessions.db"
    with served(launch, path) as gateway:
        set_value(gateway, "s", "a snake game")
        gateway.stop()
        kept = path.read_bytes()
        path.unlink()
        refused = subprocess.run(gateway._command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert refused.returncode == 2
        assert "though a gateway has kept its sessions there: put it back" in refused.stderr
        path.write_bytes(kept)
        path.chmod(0o600)
        start(gateway)
        assert value_of(gateway, "s") == "a snake game"
