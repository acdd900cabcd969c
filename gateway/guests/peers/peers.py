"""The gateways that serve the same clients, and the owner of each session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from plait.gateway.config.server import ServerConfig
from plait.gateway.guests.peers.signatures import PeerKey


@dataclass(slots=True)
class Peers:
    """The gateways (or worker processes) that answer as one. Each of them has the secret `key`."""

    urls: Mapping[str, str]
    """By name: the address for the others. This gateway is included."""
    own: str
    """This gateway's name."""
    key: PeerKey
    share: bool = False
    """Whether they share a store: then `urls` changes, and the store decides the owners of sessions, not a hash."""

    @classmethod
    def sharing(cls, server: ServerConfig) -> Peers:
        """The peers of a gateway with a shared store, before it has read the store."""
        own, key = server.advertise_url, server.peer_key
        assert own is not None and key is not None, "the configuration was checked"  # noqa: PT018
        return cls({own: own}, own, PeerKey(key), share=True)

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
        """The owner of a session without a shared store, by rendezvous hashing (Thaler and Ravishankar, 1998)."""
        place = f"{tenant}\0{session}".encode()
        return max(self.urls, key=lambda name: blake2b(place, digest_size=8, key=name.encode()).digest())

    def is_own(self, tenant: str, session: str) -> bool:
        """Whether this gateway may create a session with this id."""
        return self.count == 1 or self.share or self.owner(tenant, session) == self.own
