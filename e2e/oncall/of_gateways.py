"""Situations of the gateway itself, its store, and other gateways."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from e2e.oncall.load import OTHER
from e2e.oncall.of_engines import RestartedEngine
from e2e.oncall.situation import Situation
from e2e.postgresql.server import new_database, shared_postgres
from e2e.rolling_load import CHAT
from e2e.server_process import Server, eventually
from e2e.several_gateways import PEER_KEY, SECRET

MEBIBYTE = 2**20


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
