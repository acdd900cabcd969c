"""Draining engines: one hands its prefixes over to the others while it still answers, then gets no more calls."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from plait.gateway.fleet.router import Router
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s

IDLE_S = 2.0
"""An engine that got no call for so long has nothing left that is often asked for: its hand-over is over."""

log = structlog.get_logger(__name__)


class Drains:
    """The engines of `router` that drain. Each hands over for at most `hand_over_s`; 0: it gets no calls at once."""

    def __init__(self, router: Router, supervisor: Supervisor, hand_over_s: float) -> None:
        self._router = router
        self._supervisor = supervisor
        self._hand_over_s = hand_over_s

    def __contains__(self, name: str) -> bool:
        return self._router.engines[name].draining or self.hands_over(name)

    def hands_over(self, name: str) -> bool:
        """Whether the engine may still get calls for what only it has."""
        return name in self._router.hand_over

    def begin(self, name: str) -> None:
        """The engine hands over if others take its calls, then drains."""
        if name in self:
            return
        log.info("engine draining", engine=name)
        if self._hand_over_s and self._is_replaceable(name):
            self._router.hand_over.begin(self._router.engines[name].view, loop_time_s())
            self._router.models.refresh()  # the calls that wait for it are placed anew
            self._supervisor.start(f"hand over:{name}", partial(self._hand_over, name))
        else:
            self.at_once(name)

    def at_once(self, name: str) -> None:
        """The engine gets no new calls from now on."""
        self._end(name)
        self._router.health.drain(name)

    def cancel(self, name: str) -> None:
        """The engine gets calls again."""
        self._end(name)
        self._router.health.drain(name, draining=False)
        log.info("engine active", engine=name)

    def _end(self, name: str) -> None:
        self._supervisor.cancel(f"hand over:{name}")
        self._router.hand_over.end(name)

    async def _hand_over(self, name: str) -> None:
        hand_over, ends_s = self._router.hand_over, loop_time_s() + self._hand_over_s
        while (left_s := min(ends_s, hand_over.latest_s(name) + IDLE_S) - loop_time_s()) > 0:  # noqa: ASYNC110 - a call moves the end
            await asyncio.sleep(left_s)
        log.info("engine has handed over", engine=name)
        self.at_once(name)

    def _is_replaceable(self, name: str) -> bool:
        """Whether another engine that stays takes calls for each of its models."""
        router, engine = self._router, self._router.engines[name]
        return all(
            any(
                view is not engine.view and view.engine_id not in router.hand_over for view in router.models.able(model)
            )
            for model in engine.offer.models
        )
