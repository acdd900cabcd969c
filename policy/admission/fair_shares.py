"""Tenants' shares of the whole fleet: which tenant is furthest behind (`FairShares`), and which ones are active
(`ActiveTenants`).

Each tenant has a virtual time. Each token that it is served advances this time by 1 / its weight, and the waiting
tenant with the lowest time goes next (start-time fair queueing, Goyal et al. 1996).

A tenant that comes back after a pause begins at the lowest time of the waiting tenants, so no tenant saves up a share
(the lift of the virtual token counter, Sheng et al. 2024). If no tenant waits, it begins at the time of the tenant
served last. That time would be too late while others wait: a tenant may be behind only because it waits for one busy
engine.

Deficit round robin has the same shares, but its tenants wait for a quantum as long as the longest prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import exp
from typing import Final

MOST_OLD: Final = 64
"""A heap is rebuilt when it has more stale entries than this, and more than half are stale."""

ACTIVE_S: Final = 60.0
"""A tenant is active for this long after its last call."""

LATELY_S: Final = 30.0
"""The time constant by which the sent tokens decay."""

SCALE_S: Final = 100 * LATELY_S
"""Amounts grow as `exp(t / LATELY_S)`, so they are scaled down once in this time."""


class FairShares:
    """The virtual times. `weights` (default 1) may change at any time.

    `on_earlier` is called with a tenant whose virtual time went back while it waits.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = {} if weights is None else weights
        self._served: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._order: list[tuple[float, str]] = []  # a heap of waiting tenants; their times may have advanced since
        self._latest = 0.0  # the virtual time of the tenant served last
        self.on_earlier: Callable[[str], None] = lambda _tenant: None

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """A tenant's virtual time; for one without waiting calls, the time at which it would begin."""
        own = self._served.get(tenant, 0.0)
        return own if tenant in self._waiting else max(own, self._present())

    def waits(self, tenant: str) -> None:
        """A call of the tenant begins to wait."""
        waiting = self._waiting.get(tenant, 0)
        if not waiting:
            self._served[tenant] = self.served(tenant)
            self._enter(tenant)
        self._waiting[tenant] = waiting + 1

    def is_waiting(self, tenant: str) -> bool:
        return tenant in self._waiting

    def left(self, tenant: str) -> None:
        """A call of the tenant no longer waits."""
        waiting = self._waiting[tenant] - 1
        if waiting:
            self._waiting[tenant] = waiting
        else:
            del self._waiting[tenant]

    def serve(self, tenant: str, tokens: int) -> None:
        """A call of the tenant is sent. If it has waited, call `left` after this."""
        served = self._served.get(tenant, 0.0)
        if tenant not in self._waiting:
            present = self._present() if self._order else self._latest
            served = served if served > present else present
        if served > self._latest:
            self._latest = served
        self._served[tenant] = served + tokens / self.weights.get(tenant, 1.0)

    def correct(self, tenant: str, tokens: int) -> None:
        """A call has ended: `tokens` is how many more than expected it took; negative: fewer."""
        served = self._served.get(tenant)
        if served is None:
            return
        served += tokens / self.weights.get(tenant, 1.0)
        if tenant in self._waiting:
            self._served[tenant] = max(0.0, served)
            if tokens < 0:
                self._enter(tenant)
                self.on_earlier(tenant)
        elif served > (self._present() if self._order else self._latest):
            self._served[tenant] = served
        else:
            del self._served[tenant]  # it would begin at the present anyway

    def _enter(self, tenant: str) -> None:
        heappush(self._order, (self._served[tenant], tenant))
        if len(self._order) > 2 * len(self._waiting) + MOST_OLD:
            self._order = [(self._served[name], name) for name in {*self._waiting, tenant}]
            heapify(self._order)

    def _present(self) -> float:
        """The virtual time at which a returning tenant begins."""
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


class ActiveTenants:
    """The tenants that have sent a call within `ACTIVE_S`, and the share of each.

    `weights` (default 1) may change at any time. `latest` has (time of the last call, weight) by tenant, the oldest
    first.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._given = {} if weights is None else weights
        self.latest: dict[str, tuple[float, float]] = {}
        self._weights = 0.0
        self._sent: dict[str, float] = {}  # tokens * exp((t - zero) / LATELY_S): new ones weigh more, old ones stay
        self._all_sent = 0.0
        self._zero_s = 0.0

    def came(self, tenant: str, now_s: float) -> None:
        """A call of the tenant has arrived, or was sent."""
        before = self.latest.pop(tenant, None)
        weight = self._given.get(tenant, 1.0)
        self._weights += weight - (0.0 if before is None else before[1])
        self.latest[tenant] = now_s, weight

    def sent(self, tenant: str, tokens: int, now_s: float) -> None:
        """A call of an active tenant was sent to an engine, with `tokens`."""
        if not self._sent or now_s - self._zero_s > SCALE_S:
            self._scale(now_s)
        amount = tokens * exp((now_s - self._zero_s) / LATELY_S)
        self._sent[tenant] = self._sent.get(tenant, 0.0) + amount
        self._all_sent += amount

    def is_over(self, tenant: str, now_s: float) -> bool:
        """Whether the tenant was sent more than its share of the tokens that were sent lately."""
        share = self.share(tenant, now_s)
        return self._sent.get(tenant, 0.0) > share * self._all_sent

    def are_several(self, now_s: float) -> bool:
        """Whether more than one tenant is active."""
        if len(self.latest) > 1:  # a tenant alone shares with nobody, so its last call's time does not matter
            self._forget(now_s)
        return len(self.latest) > 1

    def share(self, tenant: str, now_s: float) -> float:
        """The tenant's part by weight if all active tenants have calls; an inactive tenant counts as active."""
        self._forget(now_s)
        mine = self.latest.get(tenant)
        weight = self._given.get(tenant, 1.0) if mine is None else mine[1]
        return weight / (self._weights if mine is not None else self._weights + weight)

    def _forget(self, now_s: float) -> None:
        while self.latest:
            tenant, (latest_s, weight) = next(iter(self.latest.items()))
            if now_s - latest_s <= ACTIVE_S:
                return
            del self.latest[tenant]
            self._weights = self._weights - weight if self.latest else 0.0  # 0.0 drops rounding errors
            sent = self._sent.pop(tenant, 0.0)
            self._all_sent = self._all_sent - sent if self._sent else 0.0

    def _scale(self, now_s: float) -> None:
        """Move zero to now, and scale the amounts."""
        factor = exp((self._zero_s - now_s) / LATELY_S)
        self._sent = {tenant: factor * amount for tenant, amount in self._sent.items()}
        self._all_sent = sum(self._sent.values())
        self._zero_s = now_s
