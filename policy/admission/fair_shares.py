"""Who is furthest behind: the tokens that each tenant was served, for its weight, over the whole fleet.

Each tenant has a virtual time, which its tokens over its weight advance (start-time fair queueing, Goyal et al. 1996).
A tenant that comes back after a pause begins at the time of the one that is furthest behind of those that wait. So
nobody saves up a share (the lift of the virtual token counter, Sheng et al. 2024). If nobody waits, it begins at the
time of the tenant served last. That would be too late beside others that wait: a tenant may be behind because it waits
for one busy engine, while the fleet goes on. Deficit round robin has the same shares; here nobody waits for a quantum
as long as the longest prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

MOST_OLD: Final = 64
"""More old entries than this, and more than half, are thrown away."""


class FairShares:
    """The virtual times. `weights` are the tenants' shares (default 1). They may change at any time.

    `on_earlier` is called with a tenant whose virtual time has gone back.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = {} if weights is None else weights
        self._served: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._order: list[tuple[float, str]] = []  # a heap of the tenants that wait; times may have advanced since
        self._latest = 0.0  # the time of the tenant served last
        self.on_earlier: Callable[[str], None] = lambda _tenant: None

    def weight(self, tenant: str) -> float:
        """A tenant's weight."""
        return self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """A tenant's virtual time."""
        own = self._served.get(tenant, 0.0)
        return own if tenant in self._waiting else max(own, self._present())

    def waits(self, tenant: str) -> None:
        """A call of the tenant waits."""
        waiting = self._waiting.get(tenant, 0)
        if not waiting:
            self._served[tenant] = self.served(tenant)
            self._enter(tenant)
        self._waiting[tenant] = waiting + 1

    def left(self, tenant: str) -> None:
        """A call of the tenant does not wait any more."""
        waiting = self._waiting[tenant] - 1
        if waiting:
            self._waiting[tenant] = waiting
        else:
            del self._waiting[tenant]

    def serve(self, tenant: str, tokens: int) -> None:
        """A call of the tenant is sent. If it has waited, `left` comes after this."""
        served = self.served(tenant)
        self._latest = max(self._latest, served)
        self._served[tenant] = served + tokens / self.weight(tenant)

    def correct(self, tenant: str, tokens: int) -> None:
        """A call has ended: it took so many tokens more (or less, if negative) than expected."""
        served = self._served.get(tenant)
        if served is None:
            return
        served += tokens / self.weight(tenant)
        if tenant in self._waiting:
            self._served[tenant] = max(0.0, served)
            if tokens < 0:
                self._enter(tenant)
                self.on_earlier(tenant)
        elif served > self._present():
            self._served[tenant] = served
        else:
            del self._served[tenant]  # as good as new

    def _enter(self, tenant: str) -> None:
        heappush(self._order, (self._served[tenant], tenant))
        if len(self._order) > 2 * len(self._waiting) + MOST_OLD:
            self._order = [(self._served[name], name) for name in {*self._waiting, tenant}]
            heapify(self._order)

    def _present(self) -> float:
        """Where a tenant begins that comes back."""
        order = self._order
        while order:
            entered, tenant = order[0]
            if tenant not in self._waiting:
                heappop(order)
            elif (served := self._served[tenant]) > entered:
                heapreplace(order, (served, tenant))
            else:
                return entered
        return self._latest
