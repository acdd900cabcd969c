"""One engine's health: a state machine driven by the outcomes of its calls and probes (docs/design/failures.md).

It follows Envoy's outlier detection, and is pure: times and the jitter are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

JITTER_SHARE = 0.25
"""The largest part of a pause that the jitter takes off, so that the probes of many gateways spread out."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What an engine serves: its models, each with its context in tokens (None: not known), and its routes.

    `adapters` maps each LoRA adapter among the models to its base model. `routes` are paths; None: not known.
    `fields` are a route's body fields, for routes whose bodies the engine describes.
    """

    models: Mapping[str, int | None] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    routes: Collection[str] | None = None
    fields: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def trial_model(self) -> str:
        """The model that trials ask for: preferably no adapter, whose calls may wait for room in the engine."""
        models = self.models.keys() - self.adapters.keys()
        return min(models or self.models, default="")

    def has(self, route: str) -> bool | None:
        """Whether the engine has a route; None if that is not known.

        Engines have some routes with and without `/v1`, and do not always list both.
        """
        return None if self.routes is None else route in self.routes or f"/v1{route}" in self.routes

    def lacks_field(self, route: str, name: str) -> bool:
        """Whether the engine describes the route's body, and not this field."""
        return route in self.fields and name not in self.fields[route]


class HealthState(StrEnum):
    """The states of an engine's health; `TAKES_CALLS` are those in which it gets calls."""

    UNTRIED = "untried"
    UP = "up"
    SUSPECT = "suspect"
    EJECTED = "ejected"
    PROBATION = "probation"
    DOWN = "down"


TAKES_CALLS = frozenset((HealthState.UP, HealthState.SUSPECT, HealthState.PROBATION))
"""An engine on probation takes one call at a time."""

NOT_THERE = frozenset((HealthState.UNTRIED, HealthState.DOWN))


class HealthEvent(StrEnum):
    ANSWERED = "answered"
    """A probe got the list of its models."""
    UNREACHABLE = "unreachable"
    """A connection failed, or probes had no answer."""
    SUCCEEDED = "succeeded"
    """A call got its whole answer."""
    FAILED = "failed"
    """The engine failed a call."""
    TRIPPED = "tripped"
    """The engine failed too many calls, or one on probation."""
    PASSED = "passed"
    """A trial got its answer."""


TRANSITIONS: dict[tuple[HealthState, HealthEvent], HealthState] = {
    (HealthState.UNTRIED, HealthEvent.ANSWERED): HealthState.UP,
    (HealthState.UNTRIED, HealthEvent.UNREACHABLE): HealthState.DOWN,
    (HealthState.UP, HealthEvent.FAILED): HealthState.SUSPECT,
    (HealthState.UP, HealthEvent.TRIPPED): HealthState.EJECTED,
    (HealthState.UP, HealthEvent.UNREACHABLE): HealthState.DOWN,
    (HealthState.SUSPECT, HealthEvent.SUCCEEDED): HealthState.UP,
    (HealthState.SUSPECT, HealthEvent.TRIPPED): HealthState.EJECTED,
    (HealthState.SUSPECT, HealthEvent.UNREACHABLE): HealthState.DOWN,
    (HealthState.EJECTED, HealthEvent.PASSED): HealthState.PROBATION,
    (HealthState.EJECTED, HealthEvent.UNREACHABLE): HealthState.DOWN,
    (HealthState.PROBATION, HealthEvent.SUCCEEDED): HealthState.UP,
    (HealthState.PROBATION, HealthEvent.PASSED): HealthState.UP,
    (HealthState.PROBATION, HealthEvent.TRIPPED): HealthState.EJECTED,
    (HealthState.PROBATION, HealthEvent.UNREACHABLE): HealthState.DOWN,
    (HealthState.DOWN, HealthEvent.ANSWERED): HealthState.UP,
}
"""Every other event leaves the state as it is."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When an engine is ejected, and how far apart its trials and probes are."""

    consecutive_failures: int = 3
    """Ejects the engine."""
    failed_share: float = 0.5
    """Ejects the engine if this part of at least `least_calls` calls within `window_s` failed."""
    least_calls: int = 10
    window_s: float = 10.0
    ejection_s: float = 1.0
    """The pause before the first trial, doubled with each further ejection within `memory_s`."""
    max_ejection_s: float = 5.0
    memory_s: float = 60.0
    max_retry_after_s: float = 60.0
    """The most that an engine's Retry-After counts."""
    probe_s: float = 1.0
    """The first pause between later probes or trials, doubled up to `max_probe_s`. For an engine that has never
    answered it stays, because the first calls wait for the engine.
    """
    max_probe_s: float = 3.0


@dataclass(slots=True)
class _Second:
    """The outcomes of a second."""

    begun_s: float
    calls: int = 0
    failures: int = 0


@dataclass(slots=True)
class Health:
    """One engine's health."""

    limits: HealthLimits = HealthLimits()
    state: HealthState = HealthState.UNTRIED
    cause: str = ""
    """Why the state last changed."""
    on_trial: bool = False
    """On probation, the engine has its one call."""
    next_probe_s: float = 0.0
    """The earliest time of an ejected engine's next trial."""
    ejections: int = 0
    """Ejections in a row, each within `memory_s` of the one before."""
    ejected_s: float = -float("inf")
    """The latest ejection. Outcomes of calls that were sent before do not count."""
    succeeded_s: float = -float("inf")
    """When a call last got its whole answer."""
    _failures_in_a_row: int = 0
    _failed_probes: int = 0
    _has_answered: bool = False
    _seconds: deque[_Second] = field(default_factory=deque)

    @property
    def takes_calls(self) -> bool:
        """Whether a call may be placed here now."""
        return self.state in TAKES_CALLS and not (self.state is HealthState.PROBATION and self.on_trial)

    @property
    def probe_after_s(self) -> float:
        """The pause before the next probe or trial, without jitter."""
        if not self._has_answered:
            return self.limits.probe_s
        doublings = min(30, max(0, self._failed_probes - 1))
        return min(self.limits.max_probe_s, self.limits.probe_s * float(1 << doublings))

    def on(self, event: HealthEvent, cause: str = "") -> bool:
        """Apply an event; True if the state changed, for this `cause`."""
        before, self.state = self.state, TRANSITIONS.get((self.state, event), self.state)
        if event in (HealthEvent.ANSWERED, HealthEvent.PASSED):
            self._failed_probes = 0
            self._has_answered = True
        elif event is HealthEvent.UNREACHABLE:
            self._failed_probes += 1
        if self.state is before:
            return False
        self.cause = cause
        if self.state is HealthState.UP and before is not HealthState.SUSPECT:
            self._forget_outcomes()
        return True

    def succeeded(self, sent_s: float, now_s: float) -> bool:
        """A call that was sent at `sent_s` got its whole answer; True if the state changed."""
        if sent_s < self.ejected_s:
            return False
        self._failures_in_a_row, self.succeeded_s = 0, now_s
        if not self._seconds or now_s >= self._seconds[-1].begun_s + 1:
            self._begin_second(now_s)
        self._seconds[-1].calls += 1
        return self.state is not HealthState.UP and self.on(HealthEvent.SUCCEEDED)

    def failed(self, cause: str, now_s: float) -> bool:
        """A call failed here; True if the caller has to `eject` the engine."""
        self._failures_in_a_row += 1
        if not self._seconds or now_s >= self._seconds[-1].begun_s + 1:
            self._begin_second(now_s)
        self._seconds[-1].calls += 1
        self._seconds[-1].failures += 1
        self._forget_old(now_s)
        limits = self.limits
        if self.state is HealthState.PROBATION or self._failures_in_a_row >= limits.consecutive_failures:
            return True
        calls, failures = sum(second.calls for second in self._seconds), sum(s.failures for s in self._seconds)
        if calls >= limits.least_calls and failures >= limits.failed_share * calls:
            return True
        self.on(HealthEvent.FAILED, cause)
        return False

    def eject(self, cause: str, now_s: float, jitter: float, retry_after_s: float | None = None) -> bool:
        """Take the engine out until a trial passes; True if the state changed. `jitter` is from 0 to 1."""
        if not self.on(HealthEvent.TRIPPED, cause):
            return False
        limits = self.limits
        self.ejections = self.ejections + 1 if now_s - self.ejected_s <= limits.memory_s else 1
        self.ejected_s = now_s
        pause_s = min(limits.max_ejection_s, limits.ejection_s * float(1 << min(30, self.ejections - 1)))
        pause_s *= 1 - JITTER_SHARE * jitter
        self.next_probe_s = now_s + max(pause_s, min(limits.max_retry_after_s, retry_after_s or 0.0))
        self._failed_probes = 0
        return True

    def try_failed(
        self, cause: str, begun_s: float, now_s: float, jitter: float, retry_after_s: float | None = None
    ) -> None:
        """A trial that began at `begun_s` failed. The next one comes after the pause."""
        self._failed_probes += 1
        self.on(HealthEvent.TRIPPED, cause)
        pause_s = self.probe_after_s * (1 - JITTER_SHARE * jitter)
        asked_s = min(self.limits.max_retry_after_s, retry_after_s or 0.0)
        self.next_probe_s = max(now_s, begun_s + pause_s, now_s + asked_s)

    def try_passed(self, now_s: float) -> bool:
        """A trial passed; True if the state changed. It takes two to be up: ejected, on probation, up."""
        self.next_probe_s = now_s + self.limits.probe_s
        return self.on(HealthEvent.PASSED, self.cause)

    def _begin_second(self, now_s: float) -> None:
        """Begin a new second of outcomes. Sums by second keep the window short at any call rate."""
        self._seconds.append(_Second(now_s))
        self._forget_old(now_s)

    def _forget_old(self, now_s: float) -> None:
        while self._seconds[0].begun_s < now_s - self.limits.window_s:
            self._seconds.popleft()

    def _forget_outcomes(self) -> None:
        self._seconds.clear()
        self._failures_in_a_row = 0


class Aborts(StrEnum):
    """Which calls on an engine are aborted when its health changes."""

    NONE = "none"
    WAITING = "waiting"
    """Those without a first byte."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class HealthChange:
    """A change of an engine's health. The asyncio shell (`recovery`) aborts and moves the calls that `aborts` names."""

    engine_id: str
    before: HealthState
    after: HealthState
    cause: str
    aborts: Aborts = Aborts.NONE
