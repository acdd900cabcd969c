"""The health of all engines: the part of the router that stops and resumes calls to sick engines.

In: outcomes of probes, trials and calls, and twice a second the time. Out: each event returns the `HealthChange` that
it made, if any, on which the asyncio shell acts (`recovery`).

A quiet engine gets a trial. The trial is open from `asked_s` until the engine sends bytes by itself or the trial passes
(`proved`). After `STALL_S` without an answer the engine is stalled: new calls go to other engines. Only a trial without
an answer for the engine's `hang_timeout_s` shows that the engine hangs (`hung`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

from plait.backends.errors import EngineTimeoutError
from plait.gateway.fleet.booking import STALL_S, Booking, Failure
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import TAKES_CALLS, Aborts, HealthChange, HealthEvent, HealthState, Offer
from plait.gateway.fleet.served_models import ServedModels
from plait.gateway.timer import LoopLag
from plait.policy.costs.engine_view import sent_calls

Jitter = Callable[[], float]
"""Returns a new random number from 0 to 1."""

_NO_ADAPTERS: Mapping[str, str] = {}
_NO_FIELDS: Mapping[str, Collection[str]] = {}

TIMEOUTS = frozenset((EngineTimeoutError.cause, "connect_timeout"))

SAID_S = 3.0
"""An engine that reported or counted all its calls within this time has forgotten none. The latest report alone does
not decide: a new call is missing until an iteration ends, and a finished one while its answer is on its way.
"""

SILENT_S = 4.0
"""An engine that has calls and misses its probes is busy, not silent, if a byte of an answer came within this time."""


class FleetHealth:
    """The health of all `engines`. `addresses` has the engines at each address, which go down and come up together.

    `on_fleet_change` is called when an engine begins or ceases to take calls, and `on_wrong_offer` with an engine that
    lacks a model which it has listed. `lag` is the event loop's lag, which counts against no engine. `wall_s` is the
    time since 1970. `trials` has the call on each engine on probation.
    """

    def __init__(
        self,
        engines: Mapping[str, FleetEngine],
        addresses: Mapping[str, Sequence[FleetEngine]],
        models: ServedModels,
        on_fleet_change: Callable[[], None],
        *,
        jitter: Jitter,
        wall_s: Callable[[], float],
    ) -> None:
        self._engines = engines
        self._addresses = addresses
        self._models = models
        self._on_fleet_change = on_fleet_change
        self._jitter = jitter
        self.wall_s = wall_s
        self.lag = LoopLag()
        self.trials: dict[str, Booking] = {}
        self.on_wrong_offer: Callable[[str], None] = lambda _engine_id: None

    # Probes.

    def answered(
        self,
        engine_id: str,
        models: Mapping[str, int | None],
        adapters: Mapping[str, str] = _NO_ADAPTERS,
        routes: Collection[str] | None = None,
        fields: Mapping[str, Collection[str]] = _NO_FIELDS,
    ) -> HealthChange | None:
        """A probe succeeded. The other arguments are the fields of the engine's `Offer`."""
        engine = self._engines[engine_id]
        before, changed = engine.health.state, engine.health.on(HealthEvent.ANSWERED)
        offer = Offer(dict(models), dict(adapters), routes, fields)
        if not changed and engine.offer == offer:  # called for every report, of which most change nothing
            return None
        engine.offer = offer
        self._on_fleet_change()
        return self._change(engine, before)

    def lacks(self, engine_id: str, model: str) -> None:
        """An engine has refused a call because it lacks a model that it lists.

        Its address gets no more calls for the model until its list of models is read again.
        """
        address, offer = self._engines[engine_id].address, self._engines[engine_id].offer
        if model in offer.models:
            models = {name: tokens for name, tokens in offer.models.items() if name != model}
            for engine in self._addresses[address]:
                engine.offer = replace(offer, models=models)
            self._on_fleet_change()
            self.on_wrong_offer(address)

    def unreachable(
        self, address: str, cause: str = "unreachable", said: str = "", detail: str = ""
    ) -> list[HealthChange]:
        """A connection or a probe was refused. The address gets no new calls until a probe succeeds.

        `said` is the error, and `detail` is for operators only. Running calls are not aborted: an engine that shuts
        down may finish them, and the connections of one that has ended are closed anyway.
        """
        self.went_wrong(address, said or cause, detail)
        return self._down(address, cause, Aborts.NONE)

    def went_wrong(self, address: str, error: str, detail: str) -> None:
        for engine in self._addresses[address]:
            engine.went_wrong(error, detail)

    def silent(self, address: str, asked_s: float, now_s: float, detail: str = "") -> list[HealthChange]:
        """Probes since `asked_s` were not answered in time. The address's calls are aborted: nothing else would end
        them.

        No effect if bytes of an answer have come since, also to a call that has ended, because the address is busy.
        `detail` is for operators only.
        """
        engines = self._addresses[address]
        since_s = min(asked_s, now_s - SILENT_S) if any(sent_calls(engine.view) for engine in engines) else asked_s
        heard_s = max(max(engine.progress.byte_s, engine.served_s) for engine in engines)
        if self.lag.hides(asked_s, now_s) or heard_s > since_s:
            return []
        self.went_wrong(address, "two probes in a row were not answered in time", detail)
        return self._down(address, "silent", Aborts.ALL)

    def tried(
        self, engine_id: str, failure: Failure | None, begun_s: float, now_s: float, *, computed: bool = True
    ) -> HealthChange | None:
        """A trial of an ejected engine has ended. `failure` is None if the engine `computed` the answer, or refused.

        If the engine was on probation and failed the trial, its calls without a first byte move. If the trial timed out
        and no byte of another answer came during it, all its calls are aborted.
        """
        engine = self._engines[engine_id]
        before, aborts = engine.health.state, Aborts.NONE
        if failure is None:
            engine.health.try_passed(now_s)
            if computed:
                engine.progress.proved(
                    engine.offer.trial_model, begun_s, now_s, streamed=before is HealthState.PROBATION
                )
        else:
            _blame(engine, failure)
            engine.health.try_failed(failure.cause, begun_s, now_s, self._jitter(), failure.retry_after_s)
            is_silent = failure.cause in TIMEOUTS and not self.lag.hides(begun_s, now_s)
            aborts = Aborts.ALL if is_silent and engine.progress.byte_s < begun_s else Aborts.WAITING
        return self._change(engine, before, aborts)

    # Quiet engines.

    def quiet(self, now_s: float) -> list[FleetEngine]:
        """Open a trial for each engine that has become quiet, and close those of engines that sent bytes.

        Returns the engines that need a trial now. Called about twice a second.
        """
        asked = []
        for engine in self._engines.values():
            is_quiet = engine.health.state in TAKES_CALLS and engine.progress.is_quiet(
                _heard_s(engine, self.lag, now_s)
            )
            if not is_quiet:
                engine.asked_s = inf
            elif engine.asked_s == inf:
                engine.asked_s = now_s
                asked.append(engine)
        return asked

    def stalled(self, now_s: float) -> list[FleetEngine]:
        """Mark the engines whose trials have no answer as stalled. Returns those for which that has changed."""
        changed = [engine for engine in self._engines.values() if (engine.asked_s + STALL_S < now_s) != engine.stalled]
        for engine in changed:
            engine.stalled = not engine.stalled
        if changed:
            self._on_fleet_change()
        return changed

    def proved(self, engine_id: str, begun_s: float, now_s: float, *, streamed: bool) -> None:
        """A trial that began at `begun_s` has passed: the quiet engine computes."""
        engine = self._engines[engine_id]
        engine.asked_s = inf
        engine.progress.proved(engine.offer.trial_model, begun_s, now_s, streamed=streamed)

    def hung(self, engine_id: str, asked_s: float, now_s: float) -> HealthChange | None:
        """A trial of a quiet engine has no answer since `asked_s`. The engine is ejected, and all its calls aborted.

        The calls stay if the other engines are stalled, too, because no engine would compute them sooner.
        """
        engine = self._engines[engine_id]
        if engine.asked_s == inf or self.lag.hides(asked_s, now_s):
            return None
        if not engine.progress.has_hung(_heard_s(engine, self.lag, now_s)):
            return None
        failure = Failure("hung", said="it owes answers, and does not answer a trial")
        return self._eject(
            engine, failure, now_s, Aborts.ALL, helps=self._models.have_another(engine, engine.offer.models)
        )

    def overdue(self, now_s: float) -> list[Booking]:
        """The calls to move: their engines have sent no byte for `UNHEARD_S`, and another engine takes calls."""
        return self._movable(lambda engine, heard_s: engine.progress.overdue(heard_s), now_s)

    def overtaken(self, now_s: float) -> list[Booking]:
        """The calls to move: their engines may have forgotten them, and another engine takes calls.

        No call ends for this reason, because one address may have several queues, of which one is busy.
        """
        return self._movable(
            lambda engine, heard_s: [] if _says_it_has_all(engine, now_s) else engine.progress.overtaken(heard_s), now_s
        )

    def _movable(self, late: Callable[[FleetEngine, float], list[Booking]], now_s: float) -> list[Booking]:
        return [
            booking
            for engine in self._engines.values()
            for booking in late(engine, _heard_s(engine, self.lag, now_s))
            if self._models.have_another(engine, [booking.call.model])
        ]

    def outlasting(self, now_s: float) -> list[Booking]:
        """The streams to end: their engines have forgotten them. Called about twice a second."""
        return [
            booking
            for engine in self._engines.values()
            for booking in engine.progress.outlasting(_heard_s(engine, self.lag, now_s))
            if not _says_it_has_all(engine, now_s)
        ]

    def abandoned(self, now_s: float) -> list[Booking]:
        """The streams to end: their engines have sent no byte and passed no trial for `UNHEARD_S`."""
        engines = self._engines.values()
        return [one for engine in engines for one in engine.progress.abandoned(_heard_s(engine, self.lag, now_s))]

    def drain(self, address: str, *, draining: bool = True) -> None:
        """Give the address no new calls, or (not `draining`) give it calls again. Running calls continue."""
        for engine in self._addresses[address]:
            engine.draining = draining
        self._on_fleet_change()

    def identified(self, engine_id: str, process: str | None) -> None:
        """The engine's reports name this process; None: it makes no reports."""
        engine = self._engines[engine_id]
        if engine.process != process:  # called for every report
            engine.process = process
            self._on_fleet_change()

    # Calls.

    def booked(self, engine: FleetEngine, booking: Booking) -> None:
        """A call was placed on an engine on probation, which takes no other call until this one has ended."""
        if not engine.health.on_trial:
            engine.health.on_trial = True
            self.trials[engine.view.engine_id] = booking
            self._on_fleet_change()

    def left(self, booking: Booking) -> None:
        """A call has left its engine."""
        engine_id = booking.placement.engine_id
        if self.trials.get(engine_id) is booking:
            self._end_trial(self._engines[engine_id])
            self._on_fleet_change()

    def recovered(self, engine: FleetEngine, before: HealthState) -> HealthChange | None:
        """A call got its whole answer, which changed the engine's health from `before`."""
        return self._change(engine, before)

    def failed(self, engine: FleetEngine, booking: Booking, failure: Failure, now_s: float) -> HealthChange | None:
        """The engine failed a call. An engine that sends a Retry-After is ejected at once."""
        if booking.sent_s < engine.health.ejected_s:  # a late failure would extend the ejection
            return None
        if failure.cause in TIMEOUTS and self.lag.hides(booking.sent_s, now_s):
            return None
        before = engine.health.state
        _blame(engine, failure)
        if engine.health.failed(failure.cause, now_s) or failure.retry_after_s is not None:
            return self._eject(engine, failure, now_s, Aborts.WAITING if failure.moves_waiting else Aborts.NONE)
        return self._change(engine, before)

    def serves(self, model: str, now_s: float) -> bool:
        """Whether calls for a model succeed on any engine."""
        return any(model in engine.offer.models and engine.serves(now_s) for engine in self._engines.values())

    def doubt(self, engine: FleetEngine) -> None:
        """The engine failed a call, and it is open whether the request is at fault."""
        engine.doubts += 1
        if engine.is_doubted:
            self._on_fleet_change()

    def no_doubt(self, engine: FleetEngine) -> None:
        """A doubt about the engine is decided."""
        was_doubted = engine.is_doubted
        engine.doubts -= 1
        if was_doubted and not engine.is_doubted:
            self._on_fleet_change()

    def _down(self, address: str, cause: str, aborts: Aborts) -> list[HealthChange]:
        changes = []
        for engine in self._addresses[address]:
            before = engine.health.state
            engine.cache.lost()
            engine.refused_fields.clear()  # a newer engine may start there
            engine.health.on(HealthEvent.UNREACHABLE, cause)
            changes.append(self._change(engine, before, aborts))
        return [change for change in changes if change is not None]

    def _eject(
        self, engine: FleetEngine, failure: Failure, now_s: float, aborts: Aborts, *, helps: bool = True
    ) -> HealthChange | None:
        """Eject the engine. If its models need it, or an ejection does not help its calls, it only becomes suspect."""
        before = engine.health.state
        _blame(engine, failure)
        if helps and self._models.may_eject(engine):
            engine.health.eject(failure.cause, now_s, self._jitter(), failure.retry_after_s)
            engine.progress.ejected()
        else:
            engine.health.on(HealthEvent.FAILED, failure.cause)
            aborts = Aborts.NONE
        return self._change(engine, before, aborts)

    def _change(self, engine: FleetEngine, before: HealthState, aborts: Aborts = Aborts.NONE) -> HealthChange | None:
        """The change since `before`, if any, with what follows from it."""
        after = engine.health.state
        if after is before:
            return None
        engine.health_since = self.wall_s()
        if after not in TAKES_CALLS:
            engine.asked_s = inf
        if after is not HealthState.PROBATION:
            self._end_trial(engine)
        self._on_fleet_change()
        return HealthChange(engine.view.engine_id, before, after, engine.health.cause, aborts)

    def _end_trial(self, engine: FleetEngine) -> None:
        engine.health.on_trial = False
        self.trials.pop(engine.view.engine_id, None)


def _blame(engine: FleetEngine, failure: Failure) -> None:
    """Keep the words of a failed call or trial, unless the engine is down: then those of the probe say why."""
    if engine.health.state is not HealthState.DOWN:
        engine.went_wrong(failure.said or failure.cause)


def _heard_s(engine: FleetEngine, lag: LoopLag, now_s: float) -> float:
    """The time, less the loop's lag since the engine began to owe bytes: in a lag, the gateway reads no bytes."""
    return now_s - lag.since(engine.progress.owes_since_s(now_s), now_s)


def _says_it_has_all(engine: FleetEngine, now_s: float) -> bool:
    """Whether the engine reported or counted within `SAID_S`, or the last time, that it has all calls."""
    says = engine.cache.last_report is not None or (engine.counts is not None and engine.counts.waiting is not None)
    return says and engine.complete_s >= min(engine.reported_s, now_s - SAID_S)
