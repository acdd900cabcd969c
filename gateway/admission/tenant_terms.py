"""What each tenant was promised and may use, by its identity: its weight and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from plait.gateway.admission.tenant_ids import TenantIds
from plait.gateway.admission.tenant_limits import TenantLimits
from plait.gateway.config import AdmissionConfig, TenantConfig


class TenantTerms:
    """The terms in force. `weights` has the tenants that have a section; all others weigh 1."""

    def __init__(self, admission: AdmissionConfig, ids: TenantIds, tenants: Sequence[TenantConfig] = ()) -> None:
        self._ids = ids
        self.weights: dict[str, float] = {}
        self.replace(admission, tenants)

    def replace(self, admission: AdmissionConfig, tenants: Sequence[TenantConfig]) -> None:
        """Take over another configuration. What tenants have used so far still counts."""
        self._common = TenantLimits(
            admission.calls_per_s or inf,
            admission.tokens_per_s or inf,
            admission.max_running or inf,
            admission.max_waiting or inf,
        )
        named = {self._ids.of_name(tenant.name): tenant for tenant in tenants}
        self._own = {identity: _limits(tenant, admission) for identity, tenant in named.items()}
        self.weights.clear()
        self.weights.update({identity: tenant.weight for identity, tenant in named.items()})

    def limits(self, tenant: str) -> TenantLimits:
        """What a tenant may use."""
        return self._own.get(tenant, self._common)


def _limits(tenant: TenantConfig, admission: AdmissionConfig) -> TenantLimits:
    def limit(own: float | None, common: float) -> float:
        return (common if own is None else own) or inf

    return TenantLimits(
        limit(tenant.calls_per_s, admission.calls_per_s),
        limit(tenant.tokens_per_s, admission.tokens_per_s),
        limit(tenant.max_running, admission.max_running),
        limit(tenant.max_waiting, admission.max_waiting),
    )
