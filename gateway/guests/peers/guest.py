"""The guest that answers as one with other gateways: workers of a machine, or members of a shared store."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp

from plait.backends.http.trust import SYSTEM_TRUST
from plait.gateway.doors import Guest, House, StoreState
from plait.gateway.guests.peers.forwarding import Forwarding
from plait.gateway.guests.peers.membership import Membership
from plait.gateway.guests.peers.metrics import MembershipCollector
from plait.gateway.guests.peers.owned_sessions import OwnedSessions
from plait.gateway.guests.peers.peer_front import PeerFront
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.session_routes import SessionRoutes
from plait.gateway.guests.peers.shared_engines import SharedEngines
from plait.gateway.guests.peers.shared_limits import SharedLimits
from plait.gateway.guests.store.damage import Damage
from plait.gateway.guests.store.group_commit import GroupCommit
from plait.gateway.guests.store.metrics import StoreCollector
from plait.gateway.guests.store.store import Store
from plait.gateway.others import Others, ResponsesHere, SessionsHere
from plait.gateway.streams import DELETED, RECORD_VERSION, RESPONSE, SESSION

FIRST_LOOK_S: Final = 2.0
"""The longest time that one of several gateways waits for a first engine before it takes requests."""


class PeersGuest(Guest):
    """Offers the `Others`; with `[store] url`, also the `Store` that they share and the `Membership` in it."""

    def __init__(self, house: House) -> None:
        self._house, server, url = house, house.kernel.config.server, house.kernel.config.store.url
        if (server.advertise_url or "").startswith("https:"):
            SYSTEM_TRUST.load()  # the other gateways' addresses are like its own, and not known yet
        peers = house.workers
        if url is not None:
            peers = Peers.sharing(server)
            house.offer(Membership, self._membership(url, peers))
        assert isinstance(peers, Peers)
        self._forwarding = forwarding = Forwarding(peers, house.find(Membership))
        house.offer(Others, forwarding)
        self.before = [OwnedSessions(forwarding)]

    def _membership(self, url: str, peers: Peers) -> Membership:
        """The membership in a shared store, which this offers. Raises ValueError without its driver."""
        try:
            from plait.gateway.guests.store.postgres_keeper import PostgresKeeper  # noqa: PLC0415 - an extra has what it needs
        except ImportError:
            raise ValueError("store.url needs psycopg: pip install 'plait[postgresql]'") from None

        def sign(epoch: int, url: str, release: str) -> str:
            return peers.key.sign_row(epoch, url, release, time.time())

        keeper = PostgresKeeper(
            url, peers.own, release=version("plait"), version=RECORD_VERSION, sign=sign, whole=RESPONSE
        )
        log = GroupCommit(keeper)
        self._house.offer(StoreState, self._house.offer(Store, Store(log, keeper, Damage(), "PostgreSQL")))
        return Membership(log, keeper, peers, kind=SESSION, instead=DELETED)

    def around(self, rest: ASGIApp) -> ASGIApp:
        kernel, house = self._house.kernel, self._house
        self._engines = SharedEngines(rest, self._forwarding, kernel.engines)
        return SessionRoutes(
            self._engines,
            self._forwarding,
            kernel.bodies,
            tenant_of=kernel.keys.check,
            check_admin=lambda scope: kernel.admin.check(Request(scope)),
            responses=house.find(ResponsesHere),
        )

    def in_front(self, app: ASGIApp) -> ASGIApp:
        return PeerFront(app, self._forwarding, self._house.kernel.refusals.unread)

    def start(self) -> None:
        kernel, membership = self._house.kernel, self._house.find(Membership)
        if membership is not None:
            store = self._house[Store]
            for collector in (StoreCollector(store.log), store.damage, MembershipCollector(membership)):
                kernel.registry.register(collector)
            SharedLimits(membership, self._forwarding, kernel, self._house.find(SessionsHere)).begin()

    async def until_ready(self) -> None:
        """Take over the engines of another worker, and wait for `FIRST_LOOK_S` at most until an engine has answered.

        Before that, every call would be refused.
        """
        if self._forwarding.membership is None:
            await self._engines.take_over()
        for _ in range(100):
            if self._house.kernel.router.models.names:
                break
            await asyncio.sleep(FIRST_LOOK_S / 100)

    async def stop(self) -> None:
        await self._forwarding.aclose()
