"""Who is furthest behind: the tokens that each tenant was served, for its weight, over the whole fleet.

Start-time fair queueing (Goyal et al. 1996): each tenant has a virtual time, which its tokens over its weight advance.
A tenant that comes back after a pause begins at the time of the one served last, so nobody saves up a share. Deficit
round robin has the same shares; here nobody waits for a quantum as long as the longest prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


class FairShares:
    """The virtual times. `weights` are the tenants' shares (default 1). They may change at any time.

    `on_earlier` is called with a tenant whose virtual time has gone back.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = {} if weights is None else weights
        self._served: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._now = 0.0  # virtual time: that of the tenant served last
        self.on_earlier: Callable[[str], None] = lambda _tenant: None

    def weight(self, tenant: str) -> float:
        """A tenant's weight."""
        return self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """A tenant's virtual time."""
        return max(self._served.get(tenant, 0.0), 0.0 if self._waiting.get(tenant) else self._now)

    def waits(self, tenant: str) -> None:
        """A call of the tenant waits."""
        waiting = self._waiting.get(tenant, 0)
        if not waiting:
            self._served[tenant] = self.served(tenant)
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
        self._now = max(self._now, served)
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
                self.on_earlier(tenant)
        elif served > self._now:
            self._served[tenant] = served
        else:
            del self._served[tenant]  # as good as new
