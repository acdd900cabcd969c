"""Admission: what a tenant may use, which sessions may be live, what waits for its engine, and what is refused.

A synchronous core; each event carries its time. Both the gateway and the simulator drive it.
See docs/design/admission.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.backends.errors import LimitError, PlaitError, SessionWaitingError
from plait.gateway.admission.lines import Waiting
from plait.gateway.admission.queue import Queue
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.admission.session_gates import SessionGates
from plait.gateway.admission.tenants import TenantLimits, TenantUse
from plait.gateway.fleet.router import Router
from plait.gateway.timer import At
from plait.policy.admission.fair_shares import FairShares
from plait.policy.sessions.session_gate import CHAT_TOKENS, SessionGate
from plait.policy.types import Call

KEPT = "It keeps its place: send it again."

MOST_AWAY_S = 60.0
"""No client is told to stay away for longer. SDKs do not wait longer for a retry."""

GRACE_S: Final = 10.0
"""A place is kept so much longer than the client was told to stay away."""

MOST_KEPT: Final = 10_000
"""So many places are kept. Beyond, the oldest are given up."""


class Admission:
    """The calls that wait in the gateway: first their sessions for room in the caches, then they for an engine.

    `limits` returns the limits of a tenant. `weights` are the tenants' shares (default 1); they may change. Prompts of
    fewer than `chat_tokens` that extend no other are never held for their sessions' sake; infinite: none is. `at`,
    `max_wait_s` and `ahead_s` are those of the `queue`.
    """

    def __init__(
        self,
        router: Router,
        at: At,
        limits: Callable[[str], TenantLimits],
        *,
        max_wait_s: float,
        weights: Mapping[str, float] | None = None,
        ahead_s: float = AHEAD_S,
        chat_tokens: float = CHAT_TOKENS,
    ) -> None:
        shares = FairShares(weights)
        self._uses: defaultdict[str, TenantUse] = defaultdict(TenantUse)
        self.queue = Queue(
            router,
            at,
            shares,
            limits,
            self._uses,
            max_wait_s=max_wait_s,
            ahead_s=ahead_s,
            on_sent=self._sent,
            on_given_up=self._given_up,
        )
        self.sessions = SessionGates(router, at, shares.weight, self._freed, chat_tokens)
        self._limits = limits
        self._places = KeptPlaces()
        self._numbers = count()

    # What waits.

    def waiting(self, model: str) -> int:
        """How many calls wait for an engine that serves a model."""
        return self.queue.backlogs[model].length if model in self.queue.backlogs else 0

    def outlook(self, call: Waiting) -> tuple[int, float]:
        """A waiting call's place among those of its tenant, and the seconds until it goes, as predicted."""
        if call.is_held:
            return self.sessions.outlook(call)
        return self.queue.backlogs[call.call.model].outlook(call)

    def has_place(self, call: Waiting) -> bool:
        """Whether a call was here, and has counted for its tenant's rates."""
        return self._places.has(call)

    def use(self, tenant: str) -> TenantUse:
        """What a tenant uses now."""
        return self._uses[tenant]

    # Events.

    def enter(self, call: Waiting, now_s: float) -> None:
        """A call arrives. It is sent at once, or waits, or is given up with an error. `left` or `gone` has to follow.

        Raises `LimitError` beyond its tenant's limits, `NotFoundError` or `NoEngineError` if no engine takes it.
        """
        use, limits = self._uses[call.tenant], self._limits(call.tenant)
        number = self._places.take(call, now_s) if self._places.kept else None
        call.is_back = number is not None
        if number is None:
            if not call.is_leased:
                use.check_rate(limits, call.tokens, now_s)
            number = next(self._numbers)
        call.number = number
        is_new = not call.is_back  # another one has counted before, and was taken
        passes = self.sessions.arrive(call, now_s)
        try:
            if passes:
                self.queue.enter(call, limits, now_s)
            elif not self.sessions.has_begun(call):
                others = self.sessions.waiting(call) - 1
                self.queue.check_limit(call, self.queue.waiting(call.tenant, call.call.model) + others)
        except PlaitError:
            self.sessions.gone(call, now_s)
            raise
        call.is_back = call.is_back or not passes
        if is_new:
            use.enter(call.tokens)
        if call.is_sent:
            if call.turn is not None:
                call.turn.gate.sent(call.turn)
        elif is_new and passes:
            self.queue.shed(call, now_s)

    def left(self, call: Waiting, used_tokens: int | None, now_s: float) -> None:
        """A call that was sent has ended, and its booking. `used_tokens` replaces its predicted tokens, if known."""
        self.queue.left(call, used_tokens, now_s)
        self.sessions.left(call, used_tokens, now_s)

    def gone(self, call: Waiting, now_s: float) -> None:
        """The client of a call has gone before it was sent, or in that moment."""
        if call.is_sent:
            self.queue.unsent(call, now_s)
        elif call.error is None and not call.is_held:
            self.queue.leave(call, now_s)
        self.sessions.gone(call, now_s)

    def leave(self, call: Waiting, now_s: float) -> LimitError:
        """A call that waits goes, and may come back to its place; returns what its client is to be told."""
        position, expected_s = self.outlook(call)
        again_s = min(max(1.0, expected_s), MOST_AWAY_S)
        self._places.keep(call, now_s + again_s)
        is_held, where = call.is_held, f"at place {position} of this tenant's, for about {expected_s:.0f} s more"
        self.gone(call, now_s)
        if is_held:
            text = f"The session waits until its context fits into the engines' caches, {where}."
            return SessionWaitingError(f"{text} {KEPT}", position=position, retry_after_s=again_s)
        return LimitError(f"The call waits for an engine, {where}. {KEPT}", code="waiting", retry_after_s=again_s)

    def refine(self, waiting: Waiting, call: Call) -> None:
        """The objectives of a call have changed while it waits."""
        waiting.call = call
        if not waiting.is_sent and waiting.error is None and not waiting.is_held:
            self.queue.refine(waiting)

    def limits_changed(self, now_s: float) -> None:
        """Tenants may have more running."""
        for tenant in list(self.queue.busy()):
            self.queue.place_held(tenant, now_s)

    def check(self, entered: Iterable[Waiting]) -> None:
        """Assert the invariants, with all calls that have entered and not left; for tests."""
        calls = list(entered)
        self.queue.check([call for call in calls if not call.is_held])
        self.sessions.check(calls)
        running = {call.tenant for call in calls if call.booking is not None}
        assert all(tenant in running for tenant, use in self._uses.items() if use.running)

    def _freed(self, call: Waiting, now_s: float) -> None:
        """A call's session is not held any more."""
        try:
            self.queue.enter(call, self._limits(call.tenant), now_s)
        except PlaitError as error:
            call.error = error
            self._given_up(call, now_s)
            return
        if call.is_sent:
            self._sent(call, now_s)

    def _sent(self, call: Waiting, _now_s: float) -> None:
        """A call that has waited is to be sent."""
        if call.turn is not None:
            call.turn.gate.sent(call.turn)
        if call.tell is not None:
            call.tell()

    def _given_up(self, call: Waiting, now_s: float) -> None:
        """A call that has waited is not to be sent."""
        self.sessions.gone(call, now_s)
        if call.tell is not None:
            call.tell()


class KeptPlaces:
    """The numbers of calls that have left and may come back: their clients could not be kept waiting."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], tuple[int, float]] = {}  # number and time of expiry, by the call

    def keep(self, call: Waiting, until_s: float) -> None:
        """The call has left. Its client may come back until some seconds after this time."""
        if len(self.kept) >= MOST_KEPT:
            del self.kept[next(iter(self.kept))]
        self.kept[_same(call)] = call.number, until_s + GRACE_S

    def has(self, call: Waiting) -> bool:
        """Whether the call has been here."""
        return bool(self.kept) and _same(call) in self.kept

    def take(self, call: Waiting, now_s: float) -> int | None:
        """The number of the call when it came first; None if it has not been here, or too long ago."""
        number, until_s = self.kept.pop(_same(call), (None, 0.0))
        return number if now_s <= until_s else None


def _same(call: Waiting) -> tuple[object, ...]:
    """What is equal for a call that is sent again."""
    asked = call.call
    last = asked.block_hashes[-1] if len(asked.block_hashes) else None
    return call.tenant, asked.model, asked.prompt_tokens, asked.output_limit, asked.prompt_hash, last


class AdmissionCollector(Collector):
    """What waits for an engine, and the sessions, read when scraped. What was refused is in `plait_refusals_total`.

    `tenant_label` turns a tenant into what operators read.
    """

    def __init__(self, admission: Admission, tenant_label: Callable[[str], str] = str) -> None:
        self._admission = admission
        self._tenant_label = tenant_label

    def collect(self) -> Iterator[Metric]:
        """Waiting calls and their predicted wait, by model, and by tenant for those that have some."""
        of_all = _families("plait_waiting", "Calls that wait to be sent to their engine", ["model"])
        of_one = _families("plait_tenant_waiting", "Calls of a tenant that wait", ["tenant", "model"])
        for model, backlog in list(self._admission.queue.backlogs.items()):
            _add(of_all, [model], backlog.length, backlog.wait_s)
            for tenant in backlog.tenants():
                labels = [self._tenant_label(tenant), model]
                _add(of_one, labels, backlog.waiting(tenant), backlog.tenant_wait_s(tenant))
        yield from (*of_all, *of_one)
        yield from _of_sessions(self._admission.sessions.gates)


def _of_sessions(gates: Mapping[str, SessionGate]) -> Iterator[Metric]:
    """The sessions of each model, and whether they are held."""
    sessions = GaugeMetricFamily("plait_sessions", "Agents' sessions", labels=["model", "state"])
    closed = GaugeMetricFamily("plait_session_gate_closed", "1 while sessions may be held", labels=["model"])
    tokens = GaugeMetricFamily("plait_session_live_tokens", "Contexts of live sessions, and chat", labels=["model"])
    room = GaugeMetricFamily("plait_session_kv_tokens", "KV of the engines that take calls", labels=["model"])
    value = GaugeMetricFamily("plait_session_value", "Prefill seconds saved for a second in caches", labels=["model"])
    load = GaugeMetricFamily("plait_session_load", "Share of time to compute all contexts anew", labels=["model"])
    ends = CounterMetricFamily("plait_sessions_stopped", "Live sessions that gave room", labels=["model", "reason"])
    for model, gate in list(gates.items()):
        sessions.add_metric([model, "live"], len(gate.live))
        sessions.add_metric([model, "held"], len(gate.held))
        closed.add_metric([model], gate.worth.is_closed)
        tokens.add_metric([model], gate.tokens)
        room.add_metric([model], 0 if gate.worth.caches is None else gate.worth.caches.kv_tokens)
        value.add_metric([model], gate.worth.value)
        load.add_metric([model], gate.worth.load)
        ends.add_metric([model, "paused"], gate.paused)
        ends.add_metric([model, "expired"], gate.expired)
    yield from (sessions, closed, tokens, room, value, load, ends)


def _families(name: str, what: str, labels: Sequence[str]) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    """Of calls, and of seconds."""
    calls = GaugeMetricFamily(f"{name}_calls", what, labels=labels)
    return calls, GaugeMetricFamily(f"{name}_seconds", "Predicted time until all of them are sent", labels=labels)


def _add(families: Iterable[GaugeMetricFamily], labels: Sequence[str], *values: float) -> None:
    for family, value in zip(families, values, strict=True):
        family.add_metric(labels, value)
