"""Chooses one address for each engine if a DNS name has IPv4 and IPv6 addresses.

With two addresses, an engine would count as two, and get twice its share of calls. Two addresses belong to one engine
if cache-state reports from both have the same epoch, which identifies a process. Engines without Plait's adapter have
no epoch. For them, only one address family is used: the family with more addresses that answer. A tie keeps the family
that is in use, at first IPv4.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from plait.backends.http.host import is_ipv6

Identify = Callable[[str], Awaitable[str | None]]
"""The epoch of the process at an address. Empty: an engine without reports. None: no answer."""

SETTLING_LOOKUPS: Final = 12
"""Switch families after this many lookups in a row in which the unused family had more addresses that answer: a minute
at the default interval. Name servers learn of the two families one after the other, and a lookup may miss one.
"""


class DualStack:
    """Chooses among the addresses of one name, at each lookup.

    `left_out`: addresses that answer, but are not used, because they may be second addresses of used engines.
    """

    def __init__(self, identify: Identify) -> None:
        self.left_out: set[str] = set()
        self._identify = identify
        self._epochs: dict[str, str] = {}
        self._uses_ipv6 = False
        self._behind = 0
        """Lookups in a row in which the unused family had more addresses that answer."""

    async def engines(self, found: Collection[str], used: Collection[str]) -> set[str]:
        """The addresses to use, of those `found` by this lookup and those `used` so far."""
        families = {is_ipv6(address) for address in (*found, *used)}
        if len(families) == 1:
            (self._uses_ipv6,) = families
            self.left_out = set()
            return set(found)
        candidates = {*found, *self._missed(found, used)}
        answers = await self._ask(candidates)
        self._settle(Counter(is_ipv6(address) for address in found if answers[address] is not None), used)
        candidates = {*found, *self._missed(found, used)}
        known: dict[str, str] = {}
        for address in sorted(candidates, key=lambda one: (one not in used, not self._is_preferred(one), one)):
            epoch = answers[address]
            if epoch:
                known.setdefault(epoch, address)
        silent = {address for address in candidates if answers[address] is None and self._is_preferred(address)}
        return {*known.values(), *silent, *self._of_one_family({one for one in candidates if answers[one] == ""})}

    def _is_preferred(self, address: str) -> bool:
        return is_ipv6(address) is self._uses_ipv6

    def _missed(self, found: Collection[str], used: Collection[str]) -> set[str]:
        """The used addresses of the preferred family, if this lookup has found none of that family."""
        return set() if any(map(self._is_preferred, found)) else set(filter(self._is_preferred, used))

    def _of_one_family(self, alike: set[str]) -> set[str]:
        """The addresses to use of engines without an epoch, which nothing tells apart (`alike`)."""
        preferred = set(filter(self._is_preferred, alike))
        self.left_out = alike - preferred if preferred else set()
        return preferred or alike

    def _settle(self, answering: Counter[bool], used: Collection[str]) -> None:
        """Switch families after `SETTLING_LOOKUPS` lookups in a row in which the unused family has more answers.

        While no address is used, switch at the first such lookup.
        """
        has_more = answering[not self._uses_ipv6] > answering[self._uses_ipv6]
        self._behind = self._behind + 1 if has_more else 0
        if self._behind >= SETTLING_LOOKUPS or (has_more and not used):
            self._uses_ipv6, self._behind = not self._uses_ipv6, 0

    async def _ask(self, addresses: Collection[str]) -> dict[str, str | None]:
        """The epoch at each address. An address whose epoch is known is not asked again."""
        self._epochs = {address: epoch for address, epoch in self._epochs.items() if address in addresses}
        new = [address for address in addresses if address not in self._epochs]
        answers = dict(zip(new, await asyncio.gather(*map(self._identify, new)), strict=True))
        self._epochs |= {address: epoch for address, epoch in answers.items() if epoch}
        return {**answers, **self._epochs}
