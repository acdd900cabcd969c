"""The lines before the engines: a call is placed when it arrives, and sent when its engine has room for it.

A synchronous core; each event carries its time. It drives the router. See docs/design/admission.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from plait.backends.errors import PlaitError
from plait.gateway.admission.alarms import Alarms
from plait.gateway.admission.line_changes import best_change
from plait.gateway.admission.waiting import Waiting, rank_of
from plait.gateway.fleet.room import has_room, room_s
from plait.gateway.fleet.router import Router
from plait.gateway.timer import At
from plait.policy.admission.fair_shares import FairShares
from plait.policy.admission.line import Line

PLACED_AT_ONCE = 32
"""So many calls of an engine that has gone are placed anew in one turn of the event loop: about 3 ms."""

Sent = Callable[[Waiting, float], None]
Failed = Callable[[Waiting, PlaitError, float], None]


class Lines:
    """The calls that are placed and wait, in a line for each engine. An engine is sent prompts of `ahead_s`.

    Tenants go by `shares`. `at` schedules what comes later. `on_sent` is called with a call that has waited when it is
    to be sent, and `on_failed` with one that no engine takes any more.
    """

    def __init__(
        self, router: Router, at: At, shares: FairShares, ahead_s: float, *, on_sent: Sent, on_failed: Failed
    ) -> None:
        self._router = router
        self._at = at
        self._shares = shares
        self._ahead_s = ahead_s
        self._on_sent = on_sent
        self._on_failed = on_failed
        self._lines: dict[str, Line[Waiting]] = {}
        self._waiting = 0
        self._alarms = Alarms(at, self._serve)
        self._fleet_changed = False
        router.on_room, router.models.on_change = self._on_room, self._on_fleet
        shares.on_earlier = self._on_earlier

    def place(self, call: Waiting, now_s: float) -> None:
        """Place a call. It is sent if there is room and nobody waits before it. Raises what `Router.select` raises."""
        router = self._router
        placement = router.select(call.call, now_s, prefer=call.prefer, avoid=call.avoid, route=call.route)
        call.is_sent = not self._lines.get(placement.engine_id) and self._has_room(placement.engine_id, now_s)
        call.booking = router.book(call.call, placement, now_s, waits=not call.is_sent)
        if call.is_sent:
            self._shares.serve(call.tenant, call.tokens)

    def join(self, call: Waiting, now_s: float) -> None:
        """A placed call waits in the line of its engine."""
        engine_id = _engine_id(call)
        line = self._lines.get(engine_id)
        if line is None:
            line = self._lines[engine_id] = Line(self._shares, self._cached_share)
        line.push(call)
        self._waiting += 1
        self._alarms.by(engine_id, room_s(self._router.engines[engine_id].view, self._ahead_s, now_s), now_s)

    def leave(self, call: Waiting, now_s: float) -> None:
        """A placed call is not to be sent."""
        line = self._lines.get(_engine_id(call))
        if line is not None and call in line:
            line.remove(call)
            self._waiting -= 1
        assert call.booking is not None
        self._router.release(call.booking, now_s, delivered=False)
        call.booking = None

    def refine(self, call: Waiting) -> None:
        """The objectives of a waiting call have changed. If its class has, it goes to the end there."""
        assert call.booking is not None
        self._router.refine(call.booking, call.call)
        self._lines[_engine_id(call)].change_rank(call, rank_of(call.call))

    def check(self, waiting: Iterable[Waiting]) -> None:
        """Assert the invariants, with the calls that are placed and wait; for tests."""
        calls = list(waiting)
        assert self._waiting == len(calls) == sum(map(len, self._lines.values()))
        assert all(call in self._lines[_engine_id(call)] for call in calls)
        for line in self._lines.values():
            line.check()

    # Events.

    def _on_room(self, engine_id: str) -> None:
        if self._waiting:
            self._alarms.now(engine_id)

    def _on_fleet(self) -> None:
        if self._waiting and not self._fleet_changed:
            self._fleet_changed = True
            self._at(0.0, self._place_anew)

    def _on_earlier(self, tenant: str) -> None:
        for line in self._lines.values():
            line.earlier(tenant)

    def _serve(self, engine_id: str, now_s: float) -> None:
        """Send what an engine has room for. If nobody waits for it, it may take a call from another's line."""
        if engine_id not in self._router.engines:
            return
        line = self._lines.get(engine_id)
        if line and not _takes(self._router, next(iter(line)), engine_id):
            return  # its line is placed anew
        while line and self._has_room(engine_id, now_s):
            call = line.take()
            self._waiting -= 1
            self._send(call, now_s)
        if line:
            self._alarms.by(engine_id, room_s(self._router.engines[engine_id].view, self._ahead_s, now_s), now_s)
        elif self._waiting and self._router.is_ours and self._has_room(engine_id, now_s):
            self._help(engine_id, now_s)

    def _help(self, engine_id: str, now_s: float) -> None:
        """An engine has room and nobody waits for it: the call that gains most goes there."""
        best = best_change(self._router, self._lines, engine_id, now_s)
        if best is not None:
            call, placement = best
            self._shares.serve(call.tenant, call.tokens)
            self.leave(call, now_s)
            call.booking = self._router.book(call.call, placement, now_s, waits=True)
            self._send(call, now_s)
            self._on_room(engine_id)

    def _place_anew(self, now_s: float) -> None:
        """Place the calls anew that wait for an engine that takes them no more, in the order in which they came."""
        self._fleet_changed = False
        self._lines = {engine_id: line for engine_id, line in self._lines.items() if line}
        eligible = self._router.models.eligible_ids()
        calls = [
            call
            for engine_id, line in self._lines.items()
            for call in line
            if engine_id not in eligible.get(call.call.model, ())
        ]
        self._place_next(sorted(calls, key=lambda call: -call.number), now_s)

    def _place_next(self, calls: list[Waiting], now_s: float) -> None:
        """Place the last of these calls anew, if they still wait, and the others in later turns."""
        for call in [calls.pop() for _ in calls[:PLACED_AT_ONCE]]:
            if call.booking is None or call not in self._lines.get(_engine_id(call), ()):
                continue
            self._shares.waits(call.tenant)  # all the time, so that its virtual time stays
            self.leave(call, now_s)
            try:
                self.place(call, now_s)
            except PlaitError as error:
                self._on_failed(call, error, now_s)
            else:
                self._on_sent(call, now_s) if call.is_sent else self.join(call, now_s)
            self._shares.left(call.tenant)
        if calls:
            self._at(0.0, partial(self._place_next, calls))
            return
        for engine_id in self._router.engines:
            self._on_room(engine_id)

    def _send(self, call: Waiting, now_s: float) -> None:
        assert call.booking is not None
        self._router.send(call.booking, now_s)
        call.is_sent = True
        self._on_sent(call, now_s)

    def _has_room(self, engine_id: str, now_s: float) -> bool:
        return has_room(self._router.engines[engine_id].view, self._ahead_s, now_s)

    def _cached_share(self, call: Waiting) -> float:
        """The part of a waiting call's tokens that it would find in the cache now."""
        booking = call.booking
        assert booking is not None
        return self._router.engines[booking.placement.engine_id].ready_tokens(booking) / max(1, call.tokens)


def _takes(router: Router, call: Waiting, engine_id: str) -> bool:
    return any(view.engine_id == engine_id for view in router.models.able(call.call.model))


def _engine_id(call: Waiting) -> str:
    assert call.booking is not None
    return call.booking.placement.engine_id
