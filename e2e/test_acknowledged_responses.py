"""Responses that were acknowledged are found while workers or gateways are killed, or the client is told to ask again.

Where several gateways share a store, one of them is killed each time, else one of two workers.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest

from e2e.server_process import NO_TLS, Server, eventually
from e2e.servers import GATEWAYS, Launcher
from e2e.several_gateways import Gateways
from tests.waiting import WITHIN_S

CLIENTS: Final = 6
STORED: Final = 300
FINAL: Final = {400, 404}
"""Statuses that no client repeats."""


class Clients:
    """Store responses, continue any of them, and ask for any, each time at a random one of `urls`."""

    def __init__(self, urls: list[str]) -> None:
        self.told: Counter[int] = Counter()
        self.stored: list[str] = []
        self._urls = urls
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def has(self, wanted: int) -> bool:
        """Whether so many responses are stored."""
        return len(self.stored) >= wanted

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stopping.is_set():
            url = chance.choice(self._urls)
            try:
                with httpx.Client(base_url=url, trust_env=False, verify=NO_TLS, timeout=WITHIN_S) as client:
                    self._store(client, chance)
                    if self.stored:
                        self.told[client.get(f"/v1/responses/{chance.choice(self.stored)}").status_code] += 1
            except httpx.TransportError:
                time.sleep(0.02)

    def _store(self, client: httpx.Client, chance: random.Random) -> None:
        body: dict[str, Any] = {"model": "demo", "input": "hi", "max_output_tokens": 4}
        if self.stored and chance.random() < 0.5:
            body["previous_response_id"] = chance.choice(self.stored)
        answer = client.post("/v1/responses", json=body)
        self.told[answer.status_code] += 1
        if answer.status_code == 200 and answer.headers.get("plait-durable") != "false":
            self.stored.append(answer.json()["id"])


def _members(gateway: Server) -> list[Server]:
    return [*gateway.members] if isinstance(gateway, Gateways) else [gateway]


def _kill_one(gateway: Server, chance: random.Random) -> Callable[[], object]:
    """Kill a gateway or a worker. Returns what brings it back."""
    if isinstance(gateway, Gateways):
        member = chance.choice(_members(gateway))
        member.kill()
        return member.start
    children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children").read_text().split()
    os.kill(int(chance.choice(children)), signal.SIGKILL)
    return lambda: None  # its parent does


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_what_was_acknowledged_is_never_unknown(launch: Launcher, tmp_path: Path, kills: int) -> None:
    engines = [launch.engine(name) for name in ("a", "b")]
    sections: dict[str, Any] = {}
    if GATEWAYS == 1:
        (tmp_path / "store").mkdir(mode=0o700)
        sections = {"server": {"workers": 2}, "store": {"path": str(tmp_path / "store" / "sessions.db")}}
    gateway = launch.gateway(engines, **sections)
    for one in (*engines, gateway):
        one.start()
        one.wait_until_ready()
    chance = random.Random(kills)
    with Clients([member.url for member in _members(gateway)]) as clients:
        for _ in range(kills):
            wanted = len(clients.stored) + STORED // kills
            eventually(partial(clients.has, wanted))
            back = _kill_one(gateway, chance)
            time.sleep(chance.uniform(0.5, 2.0))
            back()
            gateway.wait_until_ready()
    assert len(clients.stored) >= STORED
    assert not clients.told.keys() & FINAL, clients.told
    assert clients.told[200] > clients.told[503]
