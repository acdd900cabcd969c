"""The addresses of a name that are its engines, where it has addresses of both families: one for each engine.

With two, the gateway would count the engine's cache twice, and send it twice its share. Two addresses are one engine if
the reports at both have the same epoch, which is the id of a process. Engines without the adapter have no such id. They
are used by the addresses of one family: the one of which more answer, IPv4 if as many do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from plait.backends.http.host import is_ipv6

Identify = Callable[[str], Awaitable[str | None]]
"""The epoch of the process at an address; empty: it reports none. None: it does not answer."""

SETTLING_LOOKUPS: Final = 12
"""So often in a row the other family has to have more addresses before it is used: a minute at the default interval.
Name servers learn of the two families one after the other, and a lookup may miss one of them.
"""


class DualStack:
    """Chooses among the addresses of one name, at each lookup.

    `left_out` are those that answer, and are not used because nobody can tell which of the others they are.
    """

    def __init__(self, identify: Identify) -> None:
        self.left_out: set[str] = set()
        self._identify = identify
        self._epochs: dict[str, str] = {}
        self._uses_ipv6 = False
        self._behind = 0
        """Lookups in a row in which the other family had more addresses."""

    async def engines(self, found: Collection[str], used: Collection[str]) -> set[str]:
        """The addresses, among those `found` now and `used` so far, that are the engines."""
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
        """The addresses in use of the preferred family, if a lookup has found none of that."""
        return set() if any(map(self._is_preferred, found)) else set(filter(self._is_preferred, used))

    def _of_one_family(self, alike: set[str]) -> set[str]:
        """The addresses to use, among `alike` ones whose engines cannot be told apart."""
        preferred = set(filter(self._is_preferred, alike))
        self.left_out = alike - preferred if preferred else set()
        return preferred or alike

    def _settle(self, answering: Counter[bool], used: Collection[str]) -> None:
        """Prefer the family of which more addresses answer, once that has lasted."""
        has_more = answering[not self._uses_ipv6] > answering[self._uses_ipv6]
        self._behind = self._behind + 1 if has_more else 0
        if self._behind >= SETTLING_LOOKUPS or (has_more and not used):
            self._uses_ipv6, self._behind = not self._uses_ipv6, 0

    async def _ask(self, addresses: Collection[str]) -> dict[str, str | None]:
        """Who is at each address. An address that has said its epoch is not asked again."""
        self._epochs = {address: epoch for address, epoch in self._epochs.items() if address in addresses}
        new = [address for address in addresses if address not in self._epochs]
        answers = dict(zip(new, await asyncio.gather(*map(self._identify, new)), strict=True))
        self._epochs |= {address: epoch for address, epoch in answers.items() if epoch}
        return {**answers, **self._epochs}
