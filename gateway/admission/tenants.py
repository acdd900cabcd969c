"""Tenants: who they are, what each was promised and may use, and what it uses now.

A tenant is an identity inside, which nobody can guess, and a label for operators. The identity is the tenant's cache
salt in the engines, and owns its sessions. It is an HMAC, so that only who has the server's secret can tell it from a
key or a name. `/metrics` may be open, so it shows labels only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import digest
from math import inf
from secrets import token_bytes
from typing import Final

from plait.backends.errors import LimitError, ReachedLimit
from plait.gateway.config.sections import AdmissionConfig, TenantConfig

IDENTITY_DIGITS: Final = 32
"""Hexadecimal: 128 bits. All identities have the same length, so that none with a client's salt behind it is another's
with another salt."""

LABEL_DIGITS: Final = 8
"""Hexadecimal: of a thousand tenants, two have the same label with a chance of 1 in 8,000."""


class TenantIds:
    """Identities and labels, which stay the same as long as the `secret` does. Without one they last as long as this.

    An open gateway has one tenant, the empty string.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or token_bytes(32)
        self._names: dict[str, str] = {}  # by identity, also of tenants that are gone: their calls may still run

    def of_key(self, key: str) -> str:
        """The tenant that has only this key."""
        return self._identity(b"key", key)

    def of_name(self, name: str) -> str:
        """The tenant of a `[[tenants]]` section."""
        tenant = self._identity(b"name", name)
        self._names[tenant] = name
        return tenant

    def label(self, tenant: str) -> str:
        """What logs and metrics call a tenant: its name, or the first digits of its identity."""
        return self._names.get(tenant) or tenant[:LABEL_DIGITS]

    def _identity(self, kind: bytes, value: str) -> str:
        message = b"plait-tenant\0%b\0%b" % (kind, value.encode())
        return digest(self._secret, message, sha256).hex()[:IDENTITY_DIGITS]


BURST_S = 10.0
"""A tenant may use up to so many seconds of its rate at once."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Infinite where there is no limit."""

    calls_per_s: float = inf
    tokens_per_s: float = inf
    max_running: float = inf
    max_waiting: float = inf
    has_rates: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_rates", self.calls_per_s < inf or self.tokens_per_s < inf)


UNLIMITED = TenantLimits()


@dataclass(slots=True)
class TenantUse:
    """What one tenant uses. `running` counts its calls that are placed.

    Rates are token buckets that hold `BURST_S` of use. The tenant `has_rates` since its latest call, or had none then.
    """

    running: int = 0
    has_rates: bool = False
    _calls: float = 0.0
    _tokens: float = 0.0
    _at_s: float = -inf

    def check_rate(self, limits: TenantLimits, tokens: int, now_s: float) -> None:
        """Raise `LimitError` if one more call of these tokens is beyond a rate.

        A call above a whole burst may go if nothing was used before.
        """
        self.has_rates = limits.has_rates
        if not limits.has_rates:
            self._at_s = -inf  # what was used without a limit does not count later
            return
        self._drain(limits, now_s)
        for used, more, rate, unit in (
            (self._calls, 1, limits.calls_per_s, "calls"),
            (self._tokens, tokens, limits.tokens_per_s, "tokens"),
        ):
            over = used + more - max(BURST_S * rate, more) if rate < inf else 0.0
            if over > 0:
                raise beyond_rate(rate, unit, over / rate, used / BURST_S)

    def spend(self, limits: TenantLimits, now_s: float) -> None:
        """A request was refused that was no call: it counts as one without tokens, up to a whole burst."""
        if limits.has_rates:
            self.has_rates = True
            self._drain(limits, now_s)
            self._calls = min(self._calls + 1, max(self._calls, BURST_S * limits.calls_per_s))

    def enter(self, tokens: int) -> None:
        """A call was taken of a tenant that has rates: it counts for them."""
        self._calls += 1
        self._tokens += tokens

    def _drain(self, limits: TenantLimits, now_s: float) -> None:
        """Forget what the rates have allowed since the last time."""
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        self._calls = _drained(self._calls, limits.calls_per_s, elapsed_s)
        self._tokens = _drained(self._tokens, limits.tokens_per_s, elapsed_s)


def beyond_rate(rate: float, unit: str, wait_s: float, used_per_s: float) -> LimitError:
    """What a call is told that a rate of calls or tokens allows only in some seconds."""
    return LimitError(
        f"This tenant may use {rate:g} {unit} a second; send the call again later.",
        code=f"{unit}_per_second",
        retry_after_s=max(1.0, wait_s),
        reached=ReachedLimit(f"{unit}_per_s", rate, used_per_s),
    )


def _drained(used: float, rate: float, elapsed_s: float) -> float:
    return 0.0 if inf in {rate, elapsed_s} else max(0.0, used - rate * elapsed_s)


def running_of(tenant: str) -> str:
    """The name, among gateways, of the calls that a tenant may have running."""
    return f"running {tenant}"


def waiting_of(tenant: str) -> str:
    """The name, among gateways, of the calls that a tenant may have waiting for a model."""
    return f"waiting {tenant}"


class TenantTerms:
    """The terms in force. `weights` has the tenants that have a section; all others weigh 1.

    The limits are divided among so many `gateways`, of which this one is number `index` from 0 on. If they share a
    store, `parts` returns what this one may have running and waiting, by `running_of` and `waiting_of` a tenant; None
    while the store does not say so.
    """

    def __init__(
        self,
        admission: AdmissionConfig,
        ids: TenantIds,
        tenants: Sequence[TenantConfig] = (),
        *,
        gateways: int = 1,
        index: int = 0,
    ) -> None:
        self.parts: Callable[[], Mapping[str, int] | None] | None = None
        self._ids = ids
        self._gateways = gateways
        self._index = index
        self._config = admission, tuple(tenants)
        self.weights: dict[str, float] = {}
        self.replace(admission, tenants)

    def share(self, gateways: int, index: int) -> None:
        """So many gateways share the limits from now on."""
        self._gateways, self._index = gateways, index
        self.replace(*self._config)

    def replace(self, admission: AdmissionConfig, tenants: Sequence[TenantConfig]) -> None:
        """Take over another configuration. What tenants have used so far still counts."""
        self._config = admission, tuple(tenants)
        named = {self._ids.of_name(tenant.name): tenant for tenant in tenants}
        self._common_whole = _limits(None, admission)
        self._own_whole = {identity: _limits(tenant, admission) for identity, tenant in named.items()}
        self._common = self._divided(self._common_whole)
        self._own = {identity: self._divided(whole) for identity, whole in self._own_whole.items()}
        self.weights.clear()
        self.weights.update({identity: tenant.weight for identity, tenant in named.items()})

    def limits(self, tenant: str) -> TenantLimits:
        """What a tenant may use here.

        A tenant of whom the store does not know that it has calls here may run one, if it has others elsewhere.
        """
        limits = self._own.get(tenant, self._common)
        if self.parts is None or self._gateways == 1 or limits.max_running == inf == limits.max_waiting:
            return limits
        parts = self.parts()
        if parts is None:
            return limits
        running, waiting = parts.get(running_of(tenant), 1), parts.get(waiting_of(tenant), limits.max_waiting)
        return TenantLimits(
            limits.calls_per_s,
            limits.tokens_per_s,
            inf if limits.max_running == inf else max(1, running),
            inf if limits.max_waiting == inf else max(1, waiting),
        )

    @property
    def have_counts(self) -> bool:
        """Whether any tenant has a limit on what runs or waits."""
        return any(
            (limits.max_running, limits.max_waiting) != (inf, inf)
            for limits in (self._common_whole, *self._own_whole.values())
        )

    def whole(self, tenant: str) -> TenantLimits:
        """What a tenant may use in all gateways together."""
        return self._own_whole.get(tenant, self._common_whole)

    def _divided(self, whole: TenantLimits) -> TenantLimits:
        """The part of this gateway, while nobody says who needs more."""
        rates = whole.calls_per_s / self._gateways, whole.tokens_per_s / self._gateways
        return TenantLimits(*rates, self._part(whole.max_running), self._part(whole.max_waiting))

    def _part(self, calls: float) -> float:
        """The part of a number of calls that this gateway may have. It is at least one, or none could run here."""
        if calls == inf:
            return inf
        whole, rest = divmod(int(calls), self._gateways)
        return max(1, whole + (self._index < rest))


def _limits(tenant: TenantConfig | None, admission: AdmissionConfig) -> TenantLimits:
    """The limits of a tenant in all gateways together; None: of those that have none of their own."""

    def limit(name: str) -> float:
        own = None if tenant is None else getattr(tenant, name)
        return (getattr(admission, name) if own is None else own) or inf

    return TenantLimits(limit("calls_per_s"), limit("tokens_per_s"), limit("max_running"), limit("max_waiting"))
