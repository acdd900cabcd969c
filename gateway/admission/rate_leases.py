"""Tenants' rates over several gateways: each gateway leases calls and tokens from a token bucket in the shared store.

A lease is one second of the rate, plus what the waiting calls need. So a gateway asks the store about once a second for
a tenant that calls steadily. Leased amounts count as used, so the rates hold over all gateways, bursts included.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from plait.backends.errors import LimitError
from plait.gateway.admission.tenants import BURST_S, TenantLimits, beyond_rate
from plait.gateway.timer import loop_time_s

SLICE_S: Final = 1.0
"""The size of a lease beyond the waiting calls, in seconds of the rate."""

AGAIN_S: Final = 0.1
"""After the bucket was empty, calls are refused for this long without asking the store."""

UNUSED_S: Final = 2.0
"""A lease is given back after this long without a call."""

Draw = Callable[[str, "Amounts", "Amounts", "Amounts"], Awaitable["Drawn | None"]]
"""Draws from a tenant's bucket: (tenant, rates, least, most). None: the store does not answer."""


class Drawn(NamedTuple):
    """What a draw from a bucket `granted` of each amount, and the level of each amount that is `used` now."""

    granted: Sequence[float]
    used: Sequence[float]


class Amounts(NamedTuple):
    calls: float
    tokens: float


@dataclass(slots=True)
class _Lease:
    """One tenant's lease here, and the calls that wait for more."""

    rates: Amounts
    left: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The calls and tokens that are not used."""
    waiting: deque[tuple[Amounts, asyncio.Future[bool]]] = field(default_factory=deque)
    used_s: float = 0.0
    """When the latest call came."""
    asks: asyncio.Task[None] | None = None
    """The task that asks the store; None: none runs."""
    refused: Drawn | None = None
    """The latest draw that was too small."""
    refused_until_s: float = 0.0

    def limited(self, tokens: int) -> Amounts:
        """What a call takes: 0 of an amount without a limit, so that no call asks the store for it."""
        return Amounts(*(want if rate < inf else 0 for want, rate in zip((1, tokens), self.rates, strict=True)))

    def take(self, wanted: Amounts) -> bool:
        """Use the amounts if both are left; returns whether they were."""
        if any(have < want for have, want in zip(self.left, wanted, strict=True)):
            return False
        self.left = [have - want for have, want in zip(self.left, wanted, strict=True)]
        return True


class RateLeases:
    """The leases of one gateway. `rates` returns the limits of a tenant over all gateways."""

    def __init__(self, rates: Callable[[str], TenantLimits], draw: Draw) -> None:
        self._rates = rates
        self._draw = draw
        self._leases: dict[str, _Lease] = {}

    async def take(self, tenant: str, tokens: int, on_wait: Callable[[float], None] | None = None) -> bool:
        """Let one more call of a tenant through. Raises `LimitError` beyond a rate.

        False: nothing was decided, because the tenant has no rates or the store is not reachable. If the call waits for
        the store, `on_wait` is called first, with the time.
        """
        limits = self._rates(tenant)
        rates = Amounts(limits.calls_per_s, limits.tokens_per_s)
        if rates == (inf, inf):
            return False
        lease = self._leases.get(tenant)
        if lease is None or lease.rates != rates:
            lease = self._leases[tenant] = _Lease(rates)
        wanted, lease.used_s = lease.limited(tokens), loop_time_s()
        if not lease.waiting and lease.take(wanted):
            return True
        if lease.refused is not None and lease.used_s < lease.refused_until_s:
            raise _refusal(lease, wanted, lease.refused)
        if on_wait is not None:
            on_wait(lease.used_s)
        told = asyncio.get_running_loop().create_future()
        lease.waiting.append((wanted, told))
        if lease.asks is None:
            lease.asks = asyncio.create_task(self._ask(tenant, lease), name="rate-lease")
        return bool(await told)

    def spend(self, tenant: str) -> None:
        """A request was refused before it became a call: it uses one call of the lease, if one is left."""
        lease = self._leases.get(tenant)
        if lease is not None and lease.left[0] >= 1:
            lease.left[0] -= lease.limited(0).calls

    def put_back(self, tenant: str, tokens: int) -> None:
        """A call that was let through was refused for another reason."""
        lease = self._leases.get(tenant)
        if lease is not None:
            lease.left = [have + back for have, back in zip(lease.left, lease.limited(tokens), strict=True)]

    async def keep(self) -> None:
        """Run for ever: give back leases that tenants no longer use."""
        while True:
            await asyncio.sleep(UNUSED_S)
            for tenant, lease in list(self._leases.items()):
                if lease.asks is None and loop_time_s() - lease.used_s > UNUSED_S:
                    del self._leases[tenant]
                    await self._give_back(tenant, lease)

    async def _give_back(self, tenant: str, lease: _Lease) -> None:
        left = Amounts(*(-amount for amount in lease.left))
        await self._draw(tenant, lease.rates, left, left)  # without an answer, the lease counts as used

    async def _ask(self, tenant: str, lease: _Lease) -> None:
        """Ask the store until no call waits."""
        try:
            while lease.waiting:
                await self._ask_once(tenant, lease)
        finally:
            lease.asks = None
            _tell(lease, is_leased=False)  # calls that still wait after an unexpected error

    async def _ask_once(self, tenant: str, lease: _Lease) -> None:
        least, most = (_more_than(lease, wanted) for wanted in (lease.waiting[0][0], _sum(lease.waiting)))
        most = Amounts(
            *(want + SLICE_S * rate if rate < inf else 0 for want, rate in zip(most, lease.rates, strict=True))
        )
        drawn = await self._draw(tenant, lease.rates, least, most)
        if drawn is None:
            _tell(lease, is_leased=False)
            return
        lease.left = [have + got for have, got in zip(lease.left, drawn.granted, strict=True)]
        while lease.waiting and (lease.waiting[0][1].done() or lease.take(lease.waiting[0][0])):
            _, told = lease.waiting.popleft()
            if not told.done():  # done: the call's task was cancelled, because its client has gone
                told.set_result(True)
        if any(got < want for got, want in zip(drawn.granted, most, strict=True)):
            lease.refused, lease.refused_until_s = drawn, loop_time_s() + AGAIN_S
            for wanted, told in lease.waiting:
                if not told.done():
                    told.set_exception(_refusal(lease, wanted, drawn))
            lease.waiting.clear()


def _sum(waiting: Iterable[tuple[Amounts, object]]) -> Amounts:
    return Amounts(*map(sum, zip(*(wanted for wanted, _ in waiting), strict=True)))


def _more_than(lease: _Lease, wanted: Amounts) -> Amounts:
    """The part of the amounts that the lease lacks."""
    return Amounts(*(want - have for want, have in zip(wanted, lease.left, strict=True)))


def _tell(lease: _Lease, *, is_leased: bool) -> None:
    for _, told in lease.waiting:
        if not told.done():
            told.set_result(is_leased)
    lease.waiting.clear()


def _refusal(lease: _Lease, wanted: Amounts, drawn: Drawn) -> LimitError:
    """The error of a call beyond a rate; beyond both, of the rate that takes longer to allow it."""
    waits = [
        ((used + want - max(BURST_S * rate, want)) / rate if rate < inf else 0.0, rate, unit, used / BURST_S)
        for used, want, rate, unit in zip(drawn.used, wanted, lease.rates, ("calls", "tokens"), strict=True)
    ]
    wait_s, rate, unit, used_per_s = max(waits)
    return beyond_rate(rate, unit, wait_s, used_per_s)
