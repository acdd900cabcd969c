"""Situations of the gateway itself, its store, and other gateways."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from typing import Any

from e2e.oncall.load import OTHER
from e2e.oncall.of_engines import RestartedEngine
from e2e.oncall.situation import Situation
from e2e.postgresql.server import new_database, shared_postgres
from e2e.rolling_load import CHAT
from e2e.server_process import Server, eventually
from e2e.several_gateways import PEER_KEY, SECRET

MEBIBYTE = 2**20
APART_S = 120
ANOTHER_CLOCK = f"""
import runpy, time
clock = time.time
time.time = lambda: clock() + {APART_S}
runpy.run_module("plait.gateway.cli", run_name="__main__", alter_sys=True)
"""


class MemoryGrows(Situation):
    """Clients send large bodies, and do not end them."""

    part = "memory-grows"
    problems = frozenset({("memory_grows", "")})
    before_s = 250.0
    bodies, body_bytes = 16, 30 * MEBIBYTE

    async def begin(self) -> None:
        self._clients = [await asyncio.to_thread(self._send) for _ in range(self.bodies)]

    def _send(self) -> socket.socket:
        sender = socket.create_connection(("127.0.0.1", self.gateway.port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {OTHER}-key\r\n"
        head += f"content-type: application/json\r\ncontent-length: {self.body_bytes}\r\n\r\n"
        sender.sendall(head.encode())
        sender.sendall(bytes(2 * self.body_bytes // 3))
        return sender

    async def mend(self) -> None:
        for sender in self._clients:
            sender.close()


class ReloadRefused(Situation):
    """The configuration is changed to one that is not valid, and loaded again."""

    part = "a-reload-was-refused"
    problems = frozenset({("reload_refused", "")})
    callers = 1

    async def begin(self) -> None:
        self._file = self.folder / "gateway.toml"
        self._config = self._file.read_text()
        self._file.write_text(f"{self._config}[admission]\nmax_wait_s = -1\n")
        self.gateway.signal(signal.SIGHUP)

    async def shows(self) -> None:
        """The sentence says what is wrong in the file."""
        status = await asyncio.to_thread(lambda: self.admin("GET", "/status").json())
        (sentence,) = [one["sentence"] for one in status["problems"] if one["code"] == "reload_refused"]
        assert "admission.max_wait_s" in sentence, sentence

    async def mend(self) -> None:
        self._file.write_text(self._config)
        self.gateway.signal(signal.SIGHUP)


class SharedStore(Situation):
    """Gateways that share a PostgreSQL."""

    gateways = 2

    def make_gateways(self) -> list[Server]:
        self.database = new_database(shared_postgres())
        return [
            self.launch.gateway(self.engines.values(), f"gateway-{number}", **self.sections())
            for number in range(self.gateways)
        ]

    def sections(self) -> dict[str, Any]:
        sections = super().sections()
        server = {**sections["server"], "secret": SECRET, "peer_key": PEER_KEY}
        return {**sections, "server": server, "store": {"url": self.database}}

    def start(self) -> None:
        super().start()
        for gateway in self.servers[1:]:
            gateway.start()
            gateway.wait_until_ready()
        eventually(lambda: self.gateway.metric("plait_peer_up") == self.gateways)


class GatewayDies(SharedStore):
    """One of two gateways is killed."""

    part = "a-gateway-dies"
    beside = frozenset({"peer_stale"})  # until its lease is over

    def make_gateways(self) -> list[Server]:
        gateways = super().make_gateways()
        self.problems = frozenset({("peer_lost", gateways[1].url)})
        return gateways

    async def begin(self) -> None:
        await asyncio.to_thread(self.servers[1].kill)

    async def mend(self) -> None:
        self.servers[1].start()
        await asyncio.to_thread(self.servers[1].wait_until_ready)


class GatewaysApart(SharedStore):
    """One of three gateways has another clock, one another key: each gateway that sees them names them."""

    part = "gateways-do-not-trust-each-other"
    gateways = 3
    beside = frozenset({"peer_stale", "peer_lost"})  # while they are restarted

    def make_gateways(self) -> list[Server]:
        gateways = super().make_gateways()
        self.problems = frozenset({("clocks_differ", gateways[1].url), ("peer_not_trusted", gateways[2].url)})
        self._command, self._file = gateways[1]._command, self.folder / f"{gateways[2].name}.toml"
        self._config = self._file.read_text()
        return gateways

    async def begin(self) -> None:
        self.servers[1]._command = [sys.executable, "-c", ANOTHER_CLOCK, *self._command[3:]]
        self._file.write_text(self._config.replace(PEER_KEY, PEER_KEY[::-1]))
        await self._restart()

    async def _restart(self) -> None:
        for gateway in self.servers[1:]:
            await asyncio.to_thread(gateway.stop)
            gateway.start()
            await asyncio.to_thread(gateway.wait_until_ready)

    async def shows(self) -> None:
        """The sentence has the seconds."""
        status = await asyncio.to_thread(lambda: self.admin("GET", "/status").json())
        said = {one["about"]: one["sentence"] for one in status["problems"]}
        seconds = re.search(r"(\d+) s ahead of this one's", said[self.servers[1].url])
        assert seconds is not None, said
        assert APART_S - 5 <= int(seconds[1]) <= APART_S + 1

    async def mend(self) -> None:
        self.servers[1]._command = self._command
        self._file.write_text(self._config)
        await self._restart()


class StoreDown(SharedStore):
    """The database is stopped. Plain calls notice nothing."""

    part = "the-store-is-down"
    gateways = 1

    def make_gateways(self) -> list[Server]:
        gateways = super().make_gateways()
        self.problems = frozenset({("store_failing", gateways[0].url)})
        return gateways

    async def begin(self) -> None:
        await asyncio.to_thread(shared_postgres().stop)

    async def mend(self) -> None:
        await asyncio.to_thread(shared_postgres().start)


class RollingUpdate(SharedStore, RestartedEngine):
    """Each engine is restarted with a drain, then each gateway, while the load balancer sends calls to the other."""

    part = "a-rolling-update"
    beside = frozenset({"peer_stale"})  # of a gateway that has closed its listener, until its calls have ended

    async def begin(self) -> None:
        for name in self.engines:
            await asyncio.to_thread(self.restart, name)
        for gateway in list(self.servers):
            await self._roll(gateway)

    async def _roll(self, gateway: Server) -> None:
        gateway.terminate()
        await asyncio.to_thread(eventually, lambda: gateway.get("/ready").status_code == 503)
        self.servers.remove(gateway)
        await asyncio.to_thread(gateway.wait)
        gateway.start()
        await asyncio.to_thread(gateway.wait_until_ready)
        self.servers.append(gateway)

    async def mend(self) -> None:
        """There is nothing to mend."""
