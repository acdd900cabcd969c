"""Which waiting call gains most by going to an engine that has room and nobody waiting for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plait.gateway.admission.room import backlog_s
from plait.gateway.admission.waiting import Waiting
from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.router import Router
from plait.policy.admission.line import Line
from plait.policy.placement.delay import Asked
from plait.policy.placement.line_change import change_gain_s
from plait.policy.types import Placement

LINES = 4
"""So many lines are looked at, the longest ones."""

CALLS = 16
"""So many calls of each are looked at, the latest ones: most is ahead of them. 64 sums take about a millisecond."""

LEAST_GAIN_S = 1.0
"""A change that gains less is not worth the risk that the prediction is wrong."""


def best_change(
    router: Router, lines: Mapping[str, Line[Waiting]], engine_id: str, now_s: float
) -> tuple[Waiting, Placement] | None:
    """The call that goes to the engine, and its placement there; None if none gains enough."""
    best: tuple[float, Waiting, Placement] | None = None
    longest = sorted((line for line in lines.items() if line[1]), key=lambda line: -line[1].work_s)[:LINES]
    for other_id, line in longest:
        for call, ahead_s in _candidates(router, other_id, line, now_s):
            if not _may_go(router, call, engine_id):
                continue
            assert call.booking is not None
            gain_s, placement = _gain_s(router, call.booking, ahead_s, engine_id, now_s)
            if gain_s > (LEAST_GAIN_S if best is None else best[0]):
                best = gain_s, call, placement
    return None if best is None else best[1:]


def _candidates(router: Router, engine_id: str, line: Line[Waiting], now_s: float) -> Iterator[tuple[Waiting, float]]:
    """The latest calls of a line, and the work before each of them."""
    view = router.engines[engine_id].view
    ahead_s = backlog_s(view, now_s) + view.slowness * line.work_s
    for call in line.latest(CALLS):
        ahead_s -= view.slowness * call.work_s
        yield call, max(0.0, ahead_s)


def _may_go(router: Router, call: Waiting, engine_id: str) -> bool:
    """Whether a call may change to an engine. One that continues another stays where that ran."""
    if call.prefer is not None or engine_id in call.avoid or engine_id in router.hand_over:
        return False
    if all(view.engine_id != engine_id for view in router.models.able(call.call.model)):
        return False
    return call.route is None or router.engines[engine_id].offer.has(call.route) is not False


def _gain_s(router: Router, booking: Booking, ahead_s: float, engine_id: str, now_s: float) -> tuple[float, Placement]:
    """What is gained if a call that waits goes to another engine, in seconds, and its placement there."""
    call, there = booking.call, router.engines[booking.placement.engine_id].view
    able, path = router.models.able(call.model), router.tree.match(call.block_hashes)
    situation = router.demand.situation(call, path, able, now_s)._replace(engines=[router.engines[engine_id].view])
    waits = booking.placement.cached_tokens // call.block_tokens, booking.leaf
    return change_gain_s(Asked.of(call, situation), situation, there, ahead_s, waits)
