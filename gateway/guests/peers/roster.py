"""Decides which rows of the store's table to trust. Rows are signed, because anybody with database access can add some.

| signature | what the row is | it gets |
|---|---|---|
| right and new | a gateway's | requests |
| right and older than `LIFE_S` | of a gateway that has ended, or whose clock differs | nothing: it is stale |
| wrong, or none | anybody's | nothing: a stranger's |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.signatures import LIFE_S
from plait.gateway.guests.store.event_log import LEASE_S, Member

CLOCK: Final = "The clock of the gateway at {url} is {apart} this one's: they send each other nothing. Set the clocks."
NOT_TRUSTED: Final = "The row of the gateway at {url} is not signed with our server.peer_key: nothing is sent there."

OVER_S: Final = LEASE_S / 2
"""A row that was older than this before it vanished was deleted by others: its gateway renews it each second."""

MISSED_S: Final = 600.0
"""How long a dead gateway is reported as down. After that, it was probably removed on purpose."""


class Roster:
    """The gateways by the rows that were read last.

    `members` are trusted, `strangers` are not signed with the key. `missed` maps the addresses of dead gateways to the
    time of their death, until a gateway is there again. `odd` maps the addresses that are sent nothing to the code and
    the sentence of the problem. A gateway that ends in order deletes its row at once; the row of a dead one stays
    without renewals until its lease is over.
    """

    def __init__(self, peers: Peers) -> None:
        self.members: Sequence[Member] = ()
        self.strangers: Sequence[Member] = ()
        self.missed: dict[str, float] = {}
        self.odd: dict[str, tuple[str, str]] = {}
        self._peers = peers
        self._renewed: dict[str, tuple[str, float]] = {}  # by address: the signature, and when it was first read
        self._read_s = 0.0  # the time of the last `read`

    def described(self) -> dict[str, str]:
        strangers = {row.url: "not trusted" for row in self.strangers}
        return strangers | {member.url: "stale" if member.is_stale else "live" for member in self.members}

    def read(self, rows: Sequence[Member], now_unix_s: float) -> None:
        """Replace the rows."""
        members, strangers, odd = list[Member](), list[Member](), dict[str, tuple[str, str]]()
        for row in rows:
            signed_s = self._peers.key.row_signed_s(row.signature, row.epoch, row.url, row.release)
            if signed_s is None:
                strangers.append(row)
                continue
            behind_s = round(now_unix_s - signed_s)
            is_old = abs(now_unix_s - signed_s) > LIFE_S
            members.append(row._replace(is_stale=row.is_stale or is_old))
            if row.is_stale:
                odd[row.url] = "peer_stale", f"The gateway at {row.url} has not renewed its lease in time."
            elif is_old:
                apart = f"{behind_s} s behind" if behind_s > 0 else f"{-behind_s} s ahead of"
                odd[row.url] = "clocks_differ", CLOCK.format(url=row.url, apart=apart)
        for member in members:
            if not member.is_stale:  # it is back after a death
                odd.pop(member.url, None)
        odd |= {row.url: ("peer_not_trusted", NOT_TRUSTED.format(url=row.url)) for row in strangers}
        self.members, self.strangers, self.odd = members, strangers, odd
        self._miss(now_unix_s)

    def _miss(self, now_unix_s: float) -> None:
        here, before = {member.url: member.signature for member in self.members}, self._renewed
        died = {url for url, (_, at_s) in before.items() if url not in here and self._read_s - at_s > OVER_S}
        missed = self.missed | dict.fromkeys(died, now_unix_s)
        self.missed = {url: s for url, s in missed.items() if url not in here and now_unix_s - s < MISSED_S}
        self._renewed = {
            url: before[url] if url in before and before[url][0] == signature else (signature, now_unix_s)
            for url, signature in here.items()
        }
        self._read_s = now_unix_s
