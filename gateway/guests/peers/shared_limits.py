"""One gateway of those in a shared store, which divide tenants' limits and rates and the engines' caches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from plait.gateway.admission.rate_leases import RateLeases
from plait.gateway.admission.shares import Need, needs, part_of_engines
from plait.gateway.admission.tenants import BURST_S
from plait.gateway.guests.peers.forwarding import Forwarding
from plait.gateway.guests.peers.membership import Fellow, Membership
from plait.gateway.kernel import Kernel
from plait.gateway.others import SessionsHere
from plait.gateway.timer import loop_time_s

TASKS: Final = ("lease", "rates", "shares")


class SharedLimits(Fellow):
    """The `Fellow` of a membership: hears of the other gateways, and tells them what this one needs."""

    def __init__(
        self, membership: Membership, forwarding: Forwarding, kernel: Kernel, sessions: SessionsHere | None
    ) -> None:
        self._membership = membership
        self._forwarding = forwarding
        self._kernel = kernel
        self._sessions = sessions

    def begin(self) -> None:
        """Divide from now on."""
        kernel, membership = self._kernel, self._membership
        membership.fellow = self
        leases = RateLeases(kernel.terms.whole, partial(membership.draw, burst_s=BURST_S))
        kernel.divide(lambda: membership.parts, self.part, leases)
        for name, work in zip(TASKS, (membership.keep, leases.keep, membership.share), strict=True):
            kernel.supervisor.start(name, work)

    def members_changed(self) -> None:
        peers = self._membership.peers
        self._kernel.terms.share(peers.count, peers.index)
        self._forwarding.part()

    def is_used(self, tenant: str, session: str) -> bool:
        return self._sessions is not None and self._sessions.has(tenant, session)

    def needs(self) -> Mapping[str, Need]:
        return needs(self._kernel.admission, self._kernel.terms, self._kernel.router)

    def parts_changed(self) -> None:
        self._kernel.admission.limits_changed(loop_time_s())

    def part(self, model: str) -> float:
        """The gateway's part of the engines' caches for a model."""
        found = part_of_engines(model, self._kernel.router, self._membership.parts)
        return 1 / self._membership.peers.count if found is None else found
