"""Acts on changes of the engines' health: the asyncio shell of `FleetHealth`.

The calls of an engine that went out are aborted, so that they move elsewhere. An ejected engine is tried with one-token
calls, over the connections that real calls use, until it takes calls again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import msgspec
import structlog

from plait.backends.errors import EngineError, EngineStatusError, EngineTimeoutError
from plait.gateway.answers.completions import CompletionStream, decode, ending_problem, endings, garbled
from plait.gateway.fleet.booking import Failure
from plait.gateway.fleet.fleet_health import forgotten
from plait.gateway.fleet.health import Aborts, HealthChange, HealthState
from plait.gateway.fleet.metrics import HealthMetrics
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import TOO_EARLY, EngineLink, retry_after_s
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s

HANG_CHECK_S = 0.5
MAX_TRIAL_BYTES = 2**20
_OUT = frozenset((HealthState.EJECTED, HealthState.PROBATION))

log = structlog.get_logger(__name__)


class Recovery:
    """Looks after the engines of `router`, from `open` on. A one-token call may take `trial_timeout_s`."""

    def __init__(
        self,
        router: Router,
        links: Mapping[str, EngineLink],
        supervisor: Supervisor,
        metrics: HealthMetrics,
        *,
        trial_timeout_s: float,
    ) -> None:
        self._router = router
        self._links = links
        self._supervisor = supervisor
        self._metrics = metrics
        self._trial_timeout_s = trial_timeout_s
        self._on_trial: set[str] = set()

    def open(self) -> None:
        """Start to look for hung engines, and at how late the loop is."""
        self._router.health.lag.measure(self._metrics.loop_lag.observe)
        self._supervisor.start("hang-check", self._watch)

    def close(self) -> None:
        """Measure no more how late the loop is. Everything else ends with the supervisor."""
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
        """Stop to try an engine, which has left the router."""
        self._supervisor.cancel(f"trial:{engine_id}")
        self._on_trial.discard(engine_id)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HANG_CHECK_S)
            for change in self._router.health.hung(loop_time_s()):
                self.on_change(change)
            for engine in self._router.health.stalled(loop_time_s()):
                event = "engine stalled" if engine.stalled else "engine no longer stalled"
                log.info(event, engine=engine.view.engine_id)
            for booking in forgotten(self._router.engines.values(), self._router.health.lag, loop_time_s()):
                if booking.give_up is not None:
                    booking.give_up()

    async def _try_until_up(self, engine_id: str) -> None:
        """Try an engine until it is up, or down: then the monitor finds out when it is back."""
        self._on_trial.add(engine_id)
        health = self._router.engines[engine_id].health
        try:
            while health.state in _OUT:
                await asyncio.sleep(max(0.0, health.next_probe_s - loop_time_s()))
                if health.state in _OUT:
                    begun_s = loop_time_s()
                    failure = await self._try(engine_id)
                    self.on_change(self._router.health.tried(engine_id, failure, begun_s, loop_time_s()))
        finally:
            self._on_trial.discard(engine_id)

    async def _try(self, engine_id: str) -> Failure | None:
        """Ask for one token. Returns the failure; None if the engine answered. A refusal is an answer too."""
        try:
            async with asyncio.timeout(self._trial_timeout_s):
                await self._one_token(engine_id)
        except TimeoutError:
            return Failure(EngineTimeoutError.cause, said="one token did not come in time")
        except EngineError as error:
            return Failure(error.cause, retry_after_s=error.retry_after_s, said=error.message)
        return None

    async def _one_token(self, engine_id: str) -> None:
        """Ask for one token: in a whole answer first, and on probation as a stream."""
        link, engine = self._links[engine_id], self._router.engines[engine_id]
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"plait-trial")]
        if link.authorization is not None:
            headers.append((b"authorization", link.authorization))
        streamed = engine.health.state is HealthState.PROBATION
        asked = {"model": min(engine.offer.models, default=""), "prompt": "Hello", "max_tokens": 1, "stream": streamed}
        response = await link.client.request("POST", "/v1/completions", headers, msgspec.json.encode(asked))
        try:
            answer = await response.read(MAX_TRIAL_BYTES)
        finally:
            response.abort()
        if response.status in TOO_EARLY or response.status >= 500 or link.refused_ours(response.status):
            message = f"engine {engine_id} answered with status {response.status}"
            raise EngineStatusError(message, response.status, retry_after_s=retry_after_s(response.headers))
        problem = _problem(engine_id, answer, streamed=streamed) if response.status == 200 else None
        if isinstance(problem, EngineError):
            raise problem


def _problem(engine_id: str, answer: bytes, *, streamed: bool) -> EngineError | str | None:
    """Why the answer to a trial is not a whole completion."""
    if streamed:
        stream = CompletionStream(engine_id, withhold=False)
        stream.feed(answer)
        stream.end()
        return stream.problem
    body = decode(answer)
    if body is None or not body.choices:
        return garbled(engine_id, "an answer without choices")
    return ending_problem(engine_id, [reason for _, reason in endings(body)], 1)
