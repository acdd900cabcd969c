"""Acts on changes of the engines' health: the asyncio shell of `FleetHealth`, which decides.

When an engine goes out of service, its calls are aborted, so that those without an answer move to other engines. Trials
(calls of two tokens) find out whether a quiet engine still computes, and when an ejected engine works again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from math import inf

import structlog

from plait.backends.errors import EngineError, EngineLostError, EngineTimeoutError
from plait.gateway.fleet.booking import UNHEARD_S, Booking, Failure
from plait.gateway.fleet.health import Aborts, HealthChange, HealthState
from plait.gateway.fleet.metrics import HealthMetrics
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.membership.trial import try_engine
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s

HANG_CHECK_S = 0.5

ASK_AGAIN_S = 1.0
"""The pause after an inconclusive trial of a quiet engine."""

FORGOTTEN = "serves later calls and has forgotten this one"
NOTHING_SAID = f"has sent nothing to any call for {UNHEARD_S:g} s"

_OUT = frozenset((HealthState.EJECTED, HealthState.PROBATION))

log = structlog.get_logger(__name__)


class Recovery:
    """A trial of an ejected engine may take `trial_timeout_s`; that of a quiet engine, `hang_timeout_s`."""

    def __init__(
        self,
        router: Router,
        links: Mapping[str, EngineLink],
        supervisor: Supervisor,
        metrics: HealthMetrics,
        *,
        trial_timeout_s: float,
        hang_timeout_s: float,
    ) -> None:
        self._router = router
        self._links = links
        self._supervisor = supervisor
        self._metrics = metrics
        self._trial_timeout_s = trial_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._on_trial: set[str] = set()
        self._asked: set[str] = set()

    def open(self) -> None:
        """Start the search for quiet engines, and the measurement of the event loop's lag."""
        self._router.health.lag.measure(self._metrics.loop_lag.observe)
        self._supervisor.start("hang-check", self._watch)

    def close(self) -> None:
        """Stop the measurement of the lag. The supervisor ends all tasks."""
        self._router.health.lag.stop()

    def on_change(self, change: HealthChange | None) -> None:
        """Act on a change of an engine's health, if there was one."""
        if change is None:
            return
        self._metrics.changed(change)
        say = log.info if change.after is HealthState.UP else log.warning
        event = f"engine {change.after}"
        say(event, engine=change.engine_id, was=change.before, cause=change.cause or None)
        if change.aborts is not Aborts.NONE:
            link = self._links[change.engine_id]
            link.client.lose(change.cause, waiting_only=change.aborts is Aborts.WAITING)
        if change.after in _OUT and change.engine_id not in self._on_trial:
            self._on_trial.add(change.engine_id)
            self._supervisor.start(f"trial:{change.engine_id}", partial(self._try_until_up, change.engine_id))

    def remove(self, engine_id: str) -> None:
        self._supervisor.cancel(f"trial:{engine_id}")
        self._supervisor.cancel(f"question:{engine_id}")
        self._on_trial.discard(engine_id)
        self._asked.discard(engine_id)

    async def _watch(self) -> None:
        health = self._router.health
        while True:
            await asyncio.sleep(HANG_CHECK_S)
            for engine in health.quiet(loop_time_s()):
                engine_id = engine.view.engine_id
                if engine_id not in self._asked:
                    self._asked.add(engine_id)  # here, because the task first runs later
                    self._supervisor.start(f"question:{engine_id}", partial(self._ask, engine_id))
            for engine in health.stalled(loop_time_s()):
                event = "engine stalled" if engine.stalled else "engine no longer stalled"
                log.info(event, engine=engine.view.engine_id)
            _give_up(health.overtaken(loop_time_s()), EngineLostError, FORGOTTEN)
            _give_up(health.outlasting(loop_time_s()), EngineTimeoutError, FORGOTTEN)
            _give_up(health.overdue(loop_time_s()), EngineLostError, NOTHING_SAID)
            _give_up(health.abandoned(loop_time_s()), EngineTimeoutError, NOTHING_SAID)

    async def _ask(self, engine_id: str) -> None:
        """Try a quiet engine until it computes, sends bytes again by itself, or is out of service."""
        self._asked.add(engine_id)
        health, engine = self._router.health, self._router.engines[engine_id]
        try:
            while engine.asked_s < inf:
                begun_s, streamed = loop_time_s(), engine.progress.needs_stream
                computed, failure = await self._try(engine_id, self._hang_timeout_s, streamed=streamed)
                if computed:
                    health.proved(engine_id, begun_s, loop_time_s(), streamed=streamed)
                elif failure is not None and failure.cause == EngineTimeoutError.cause:
                    self.on_change(health.hung(engine_id, begun_s, loop_time_s()))
                else:
                    await asyncio.sleep(ASK_AGAIN_S)
        finally:
            self._asked.discard(engine_id)

    async def _try_until_up(self, engine_id: str) -> None:
        """Try an engine until it is up or down. The monitor's probes bring a down engine back.

        The first trial asks for an unstreamed answer, later ones (in probation) for a stream.
        """
        self._on_trial.add(engine_id)
        health = self._router.engines[engine_id].health
        try:
            while health.state in _OUT:
                await asyncio.sleep(max(0.0, health.next_probe_s - loop_time_s()))
                if health.state in _OUT:
                    begun_s, streamed = loop_time_s(), health.state is HealthState.PROBATION
                    computed, failure = await self._try(engine_id, self._trial_timeout_s, streamed=streamed)
                    now_s = loop_time_s()
                    self.on_change(self._router.health.tried(engine_id, failure, begun_s, now_s, computed=computed))
        finally:
            self._on_trial.discard(engine_id)

    async def _try(self, engine_id: str, within_s: float, *, streamed: bool) -> tuple[bool, Failure | None]:
        """Run a trial. Returns whether the engine has computed two tokens, and its failure.

        False and None if the engine refuses the request.
        """
        link, offer = self._links[engine_id], self._router.engines[engine_id].offer
        try:
            async with asyncio.timeout(within_s):
                return await try_engine(engine_id, link, offer, streamed=streamed), None
        except TimeoutError:
            return False, Failure(EngineTimeoutError.cause, said="two tokens did not come in time")
        except EngineError as error:
            return False, Failure(error.cause, retry_after_s=error.retry_after_s, said=error.message)


def _give_up(bookings: Iterable[Booking], error: type[EngineError], why: str) -> None:
    """Fail these calls at their engines, with a message that continues "engine X ..."."""
    for booking in bookings:
        if booking.give_up is not None:
            booking.give_up(error(f"engine {booking.placement.engine_id} {why}"))
