"""One gateway of those in a shared store, which divide tenants' limits and rates and the engines' caches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from plait.gateway.admission.admission import Admission
from plait.gateway.admission.rate_leases import RateLeases
from plait.gateway.admission.shares import needs, part_of_engines
from plait.gateway.admission.tenants import BURST_S, TenantTerms
from plait.gateway.calls.gate import Gate
from plait.gateway.fleet.router import Router
from plait.gateway.peers.forwarding import Forwarding
from plait.gateway.peers.membership import Fellow, Membership
from plait.gateway.programs.sessions import Sessions
from plait.gateway.store.event_log import Need
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s

TASKS: Final = ("lease", "rates", "shares")


class SharedLimits(Fellow):
    """The `Fellow` of a membership: hears of the other gateways, and tells them what this one needs."""

    def __init__(
        self,
        membership: Membership,
        forwarding: Forwarding,
        *,
        router: Router,
        admission: Admission,
        terms: TenantTerms,
        sessions: Sessions,
    ) -> None:
        self._membership = membership
        self._forwarding = forwarding
        self._router = router
        self._admission = admission
        self._terms = terms
        self._sessions = sessions

    def begin(self, gate: Gate, supervisor: Supervisor) -> None:
        """Divide from now on."""
        membership = self._membership
        membership.fellow = self
        self._terms.parts, self._admission.sessions.part = lambda: membership.parts, self.part
        gate.leases = RateLeases(self._terms.whole, partial(membership.draw, burst_s=BURST_S))
        for name, work in zip(TASKS, (membership.keep, gate.leases.keep, membership.share), strict=True):
            supervisor.start(name, work)

    def members_changed(self) -> None:
        peers = self._membership.peers
        self._terms.share(peers.count, peers.index)
        self._forwarding.part()

    def is_used(self, tenant: str, session: str) -> bool:
        return self._sessions.has(tenant, session)

    def needs(self) -> Mapping[str, Need]:
        return needs(self._admission, self._terms, self._router)

    def parts_changed(self) -> None:
        self._admission.limits_changed(loop_time_s())

    def part(self, model: str) -> float:
        """The gateway's part of the engines' caches for a model."""
        found = part_of_engines(model, self._router, self._membership.parts)
        return 1 / self._membership.peers.count if found is None else found
