"""Which gateways serve the same clients, and which of them has a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Final

PEER_HEADER: Final = b"plait-peer"
"""Of a request from another gateway: the key, and the port that the client has asked."""


@dataclass(slots=True)
class Peers:
    """The gateways by name, this one's `own` name included, each with its address for the others.

    Whoever has the `key` is one of them. If they `share` a store, they come and go, and the store says who has a
    session. Else each finds out by itself.
    """

    urls: Mapping[str, str]
    own: str
    key: str
    share: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether there never is another one."""
        return self.count == 1 and not self.share

    @property
    def count(self) -> int:
        """How many gateways there are."""
        return len(self.urls)

    @property
    def index(self) -> int:
        """The place of this one among them."""
        return list(self.urls).index(self.own)

    @property
    def others(self) -> list[str]:
        """The names of the others."""
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

    def sign(self, port: int | None) -> tuple[bytes, bytes]:
        """The header of a request to another gateway. `port` is the one that the client has asked."""
        return PEER_HEADER, f"{self.key} {port or ''}".encode()

    def signed_port(self, value: bytes) -> int | None:
        """The port in a header that one of the gateways has signed, or 0. None if it is of somebody else."""
        key, _, port = value.partition(b" ")
        return int(port or 0) if self.key and compare_digest(key, self.key.encode()) else None


ALONE: Final = Peers({"0": ""}, "0", "")
"""A gateway without others."""
