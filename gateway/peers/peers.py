"""Which gateways serve the same clients, and which of them has a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_hex
from typing import Final

from plait.gateway.config.server import ServerConfig
from plait.gateway.peers.signatures import PeerKey


@dataclass(slots=True)
class Peers:
    """The gateways by name, this one's `own` name included, each with its address for the others.

    Whoever has the `key` is one of them. If they `share` a store, they come and go, and the store says who has a
    session. Else each finds out by itself.

    Until `unsigned_until_unix_s`, those of the release before are gateways, too, which sign nothing (`unsigned`). They
    check a client's key themselves.
    """

    urls: Mapping[str, str]
    own: str
    key: PeerKey
    share: bool = False
    unsigned_until_unix_s: float = 0.0
    unsigned: Collection[str] = ()

    @classmethod
    def sharing(cls, server: ServerConfig) -> Peers:
        """Those that share a store, as far as one of them knows before it has read the store."""
        own, key, until = server.advertise_url, server.peer_key, server.unsigned_peers_until
        assert own is not None and key is not None, "the configuration was checked"  # noqa: PT018
        return cls({own: own}, own, PeerKey(key), True, 0.0 if until is None else until.timestamp())

    @property
    def is_alone(self) -> bool:
        return self.count == 1 and not self.share

    @property
    def count(self) -> int:
        return len(self.urls)

    @property
    def index(self) -> int:
        return list(self.urls).index(self.own)

    @property
    def others(self) -> list[str]:
        return [name for name in self.urls if name != self.own]

    def owner(self, tenant: str, session: str) -> str:
        """The gateway that has a session: each of them finds the same, and each has about as many.

        Rendezvous hashing: the highest hash of a gateway with the session (Thaler and Ravishankar, 1998).
        """
        place = f"{tenant}\0{session}".encode()
        return max(self.urls, key=lambda name: blake2b(place, digest_size=8, key=name.encode()).digest())

    def is_own(self, tenant: str, session: str) -> bool:
        """Whether this gateway has a session, or may make it."""
        return self.count == 1 or self.share or self.owner(tenant, session) == self.own


ALONE: Final = Peers({"0": ""}, "0", PeerKey(token_hex(32)))
"""A gateway without others."""
