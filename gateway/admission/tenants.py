"""Tenants: their identities, weights and limits, and what each uses now.

Inside the gateway a tenant is an identity: an HMAC of its key or name, so that the identity cannot be computed without
the server's secret. The identity owns the tenant's sessions, and is its cache salt in the engines. `/metrics` may be
public, so it shows labels only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import digest
from math import inf
from secrets import token_bytes
from typing import Final

from plait.backends.errors import LimitError, ReachedLimit
from plait.gateway.config.sections import AdmissionConfig, TenantConfig

IDENTITY_DIGITS: Final = 32
"""Hexadecimal: 128 bits. All identities have one length, so that two tenants cannot get the same string by identity +
client's salt.
"""

LABEL_DIGITS: Final = 8
"""Hexadecimal: among a thousand tenants, two have the same label with a probability of 1 in 8,000."""


class TenantIds:
    """Identities and labels, which depend on the `secret` (None: a random one of this process).

    A gateway without keys has one tenant, the empty string.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or token_bytes(32)
        self._names: dict[str, str] = {}  # by identity; removed tenants stay, because their calls may still run

    def of_key(self, key: str) -> str:
        """The tenant of a key outside the `[[tenants]]` sections."""
        return self._identity(b"key", key)

    def of_name(self, name: str) -> str:
        """The tenant of a `[[tenants]]` section."""
        tenant = self._identity(b"name", name)
        self._names[tenant] = name
        return tenant

    def label(self, tenant: str) -> str:
        """What logs and metrics call a tenant: its name, or the first digits of its identity."""
        return self._names.get(tenant) or tenant[:LABEL_DIGITS]

    def stored(self, tenant: str) -> str:
        """What is stored of a tenant whose rows outlive the process: its name, or its identity."""
        return self._names.get(tenant) or tenant

    def shown(self, stored: str) -> str:
        """The label of a tenant of which this is stored."""
        is_identity = len(stored) == IDENTITY_DIGITS and stored.isascii() and stored.isalnum()
        return stored[:LABEL_DIGITS] if is_identity and stored not in self._names.values() else stored

    def _identity(self, kind: bytes, value: str) -> str:
        message = b"plait-tenant\0%b\0%b" % (kind, value.encode())
        return digest(self._secret, message, sha256).hex()[:IDENTITY_DIGITS]


BURST_S = 10.0
"""The size of the token buckets, in seconds of the rate."""


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
    """What one tenant uses: its placed calls (`running`), and two token buckets of `BURST_S` for its rates.

    `has_rates` is whether the tenant had rates at its latest call.
    """

    running: int = 0
    has_rates: bool = False
    _calls: float = 0.0
    _tokens: float = 0.0
    _at_s: float = -inf

    def check_rate(
        self, limits: TenantLimits, tokens: int, now_s: float, *, part: float = 1.0, whose: str = "tenant"
    ) -> None:
        """Raise `LimitError` if one more call with `tokens` is beyond a rate, or beyond a part of the bucket.

        A call that is larger than that passes if the bucket is full.
        """
        for wait_s, rate, unit, used_per_s in self._waits(limits, tokens, now_s, part):
            if wait_s > 0:
                raise beyond_rate(rate, unit, wait_s, used_per_s, whose)

    def wait_s(self, limits: TenantLimits, tokens: int, now_s: float) -> float:
        """How long a call that counts from now on has to wait until the rates allow it."""
        return max([wait_s for wait_s, *_ in self._waits(limits, tokens, now_s)], default=0.0)

    def _waits(
        self, limits: TenantLimits, tokens: int, now_s: float, part: float = 1.0
    ) -> Iterator[tuple[float, float, str, float]]:
        """For each rate: (seconds until it allows one more call, the rate, its unit, what is used of it)."""
        self.has_rates = limits.has_rates
        if not limits.has_rates:
            self._at_s = -inf  # empties what was used, so that use without a limit does not count later
            return
        self._drain(limits, now_s)
        for used, more, rate, unit in (
            (self._calls, 1, limits.calls_per_s, "calls"),
            (self._tokens, tokens, limits.tokens_per_s, "tokens"),
        ):
            if rate < inf:
                yield (used + more - max(part * BURST_S * rate, more)) / rate, rate, unit, used / BURST_S

    def spend(self, limits: TenantLimits, now_s: float) -> None:
        """A request was refused before it became a call: it counts as a call without tokens, up to a whole bucket."""
        if limits.has_rates:
            self.has_rates = True
            self._drain(limits, now_s)
            self._calls = min(self._calls + 1, max(self._calls, BURST_S * limits.calls_per_s))

    def enter(self, tokens: int) -> None:
        """A call passed the rates, or waits for its turn by them: count it."""
        self._calls += 1
        self._tokens += tokens

    def give_back(self, tokens: int) -> None:
        """A call that was counted will not be sent."""
        self._calls, self._tokens = max(0.0, self._calls - 1), max(0.0, self._tokens - tokens)

    def fit(self, limits: TenantLimits, now_s: float) -> None:
        """The limits have changed: what was used before is a whole bucket at most."""
        self._at_s = now_s
        self._calls = min(self._calls, BURST_S * limits.calls_per_s)
        self._tokens = min(self._tokens, BURST_S * limits.tokens_per_s)

    def _drain(self, limits: TenantLimits, now_s: float) -> None:
        """Refill the buckets for the time since the last event."""
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        self._calls = _drained(self._calls, limits.calls_per_s, elapsed_s)
        self._tokens = _drained(self._tokens, limits.tokens_per_s, elapsed_s)


def beyond_rate(rate: float, unit: str, wait_s: float, used_per_s: float, whose: str = "tenant") -> LimitError:
    """The error of a call that a rate of calls or tokens allows only after `wait_s`."""
    return LimitError(
        f"This {whose} may use {rate:g} {unit} a second; send the call again later.",
        code=f"{unit}_per_second",
        retry_after_s=max(1.0, wait_s),
        reached=ReachedLimit(f"{unit}_per_s", rate, used_per_s),
    )


def _drained(used: float, rate: float, elapsed_s: float) -> float:
    return 0.0 if inf in {rate, elapsed_s} else max(0.0, used - rate * elapsed_s)


def running_of(tenant: str) -> str:
    """The name of a tenant's running calls in the shared store."""
    return f"running {tenant}"


def waiting_of(tenant: str) -> str:
    """The name of a tenant's waiting calls for a model in the shared store."""
    return f"waiting {tenant}"


class TenantTerms:
    """The weights and limits in force. `weights` has the tenants with a section; all others weigh 1.

    The limits are divided equally among `gateways`, of which this one is number `index`, from 0 on. With a shared
    store, `parts` returns this gateway's part of running and waiting calls by their names (`running_of`, `waiting_of`);
    None while the store does not say.
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
        self.on_change: Callable[[], None] = lambda: None
        self._ids = ids
        self._gateways = gateways
        self._index = index
        self._config = admission, tuple(tenants)
        self.weights: dict[str, float] = {}
        self.replace(admission, tenants)

    def share(self, gateways: int, index: int) -> None:
        """The number of gateways that share the limits has changed."""
        self._gateways, self._index = gateways, index
        self.replace(*self._config)

    def replace(self, admission: AdmissionConfig, tenants: Sequence[TenantConfig]) -> None:
        """Use another configuration. What tenants have used so far still counts."""
        self._config = admission, tuple(tenants)
        named = {self._ids.of_name(tenant.name): tenant for tenant in tenants}
        self._common_whole = _limits(None, admission)
        self._own_whole = {identity: _limits(tenant, admission) for identity, tenant in named.items()}
        self._common = self._divided(self._common_whole)
        self._own = {identity: self._divided(whole) for identity, whole in self._own_whole.items()}
        self.weights.clear()
        self.weights.update({identity: tenant.weight for identity, tenant in named.items()})
        self.on_change()

    @property
    def gateways(self) -> int:
        """Among how many the limits are divided."""
        return self._gateways

    def limits(self, tenant: str) -> TenantLimits:
        """The limits of a tenant in this gateway.

        A tenant that the store does not know to have calls here may run one.
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
        """Whether any tenant has a limit on running or waiting calls."""
        return any(
            (limits.max_running, limits.max_waiting) != (inf, inf)
            for limits in (self._common_whole, *self._own_whole.values())
        )

    def whole(self, tenant: str) -> TenantLimits:
        """The limits of a tenant over all gateways together."""
        return self._own_whole.get(tenant, self._common_whole)

    def _divided(self, whole: TenantLimits) -> TenantLimits:
        """The equal part of the limits for this gateway."""
        rates = whole.calls_per_s / self._gateways, whole.tokens_per_s / self._gateways
        return TenantLimits(*rates, self._part(whole.max_running), self._part(whole.max_waiting))

    def _part(self, calls: float) -> float:
        """The equal part of a number of calls for this gateway: at least 1, so that a call can run here."""
        if calls == inf:
            return inf
        whole, rest = divmod(int(calls), self._gateways)
        return max(1, whole + (self._index < rest))


def _limits(tenant: TenantConfig | None, admission: AdmissionConfig) -> TenantLimits:
    """The limits of a tenant over all gateways together; None: of tenants without a section."""

    def limit(name: str) -> float:
        own = None if tenant is None else getattr(tenant, name)
        return (getattr(admission, name) if own is None else own) or inf

    return TenantLimits(limit("calls_per_s"), limit("tokens_per_s"), limit("max_running"), limit("max_waiting"))
