"""Bodies that stop before their end, at two workers: what they take of the memory is bounded on every route."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from tests.waiting import WITHIN_S

MIB: Final = 2**20
WORKERS: Final = 2
MAX_OPEN_BYTES: Final = 96 * MIB
KEY, ADMIN_KEY = "sk-one", "sk-admin"
BODIES: Final = 24
SENT: Final = bytes(31 * MIB)
ROUTES: Final = {
    "/v1/chat/completions": KEY,
    "/v1/programs": KEY,
    "/v1/sessions": KEY,
    "/admin/engines": ADMIN_KEY,
}
SLACK: Final = 16 * MIB


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = {
        "workers": WORKERS,
        "api_keys": [KEY],
        "admin_key": ADMIN_KEY,
        "max_open_body_bytes": MAX_OPEN_BYTES,
        "body_timeout_s": 4 * WITHIN_S,
    }
    with Launcher(tmp_path_factory.mktemp("bodies")) as launch:
        engine = launch.engine("demo-1")
        gateway = launch.gateway([engine], server=server)
        for one in (engine, gateway):
            one.start()
            one.wait_until_ready()
        # the gateway is ready with its first worker, and one that still starts grows by what it imports
        eventually(lambda: gateway.log().count('"listening"') == WORKERS)
        yield gateway


def memory_bytes(gateway: Server) -> int:
    """What the workers have in memory of their own."""
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split()
    assert len(children) == WORKERS
    return sum(_private_bytes(int(pid)) for pid in children)


def _after(pause_s: float, gateway: Server) -> int:
    time.sleep(pause_s)
    return memory_bytes(gateway)


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def unfinished(gateway: Server, path: str, key: str) -> socket.socket:
    """A connection that has sent 31 MiB of a larger body, or as much as was taken."""
    client = socket.create_connection(("127.0.0.1", gateway.port), timeout=WITHIN_S)
    client.settimeout(0.5)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\ncontent-length: {32 * MIB}\r\n\r\n"
    try:
        client.sendall(head.encode())
        client.sendall(SENT)
    except OSError:  # refused, or nobody reads any more
        pass
    return client


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("has_key", [False, True], ids=["no key", "key"])
def test_unfinished_bodies_take_no_more_than_they_may(gateway: Server, path: str, has_key: bool) -> None:
    bound = SLACK + (MAX_OPEN_BYTES if has_key else 0)
    assert gateway.post("/v1/chat/completions", json={}, headers={"authorization": f"Bearer {KEY}"}).status_code == 400
    before = memory_bytes(gateway)
    clients = [unfinished(gateway, path, ROUTES[path] if has_key else "") for _ in range(BODIES)]
    grown = min(_after(0.5, gateway) for _ in range(3)) - before  # what is in transit on a busy machine is not held
    for client in clients:
        client.close()
    assert grown <= bound, f"the gateway grew by {grown // MIB} MiB"
