"""The lines before the engines: a call is placed when it arrives, and sent when its engine has room for it.

A synchronous core; each event carries its time. It drives the router. See docs/design/admission.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from plait.backends.errors import PlaitError
from plait.gateway.admission.alarms import Alarms
from plait.gateway.admission.line_changes import best_change
from plait.gateway.admission.moves import Moves
from plait.gateway.admission.room import Room
from plait.gateway.admission.waiting import Waiting, rank_of
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.router import Router
from plait.gateway.timer import At
from plait.policy.admission.fair_shares import FairShares
from plait.policy.admission.line import Line
from plait.policy.placement.situation import NOTHING_PASSED, Passed

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
        self._shares = shares
        self.room = Room(ahead_s, shares)
        self._on_sent = on_sent
        self._on_failed = on_failed
        self._lines: dict[str, Line[Waiting]] = {}
        self._waiting = 0
        self._alarms = Alarms(at, self._serve)
        moves = Moves(at, self._stranded, self._move, lambda: self._alarms.all(router.engines))
        router.on_room, router.models.on_change = self._on_room, lambda: moves.soon() if self._waiting else None
        shares.on_earlier = self._on_earlier

    def place(self, call: Waiting, now_s: float) -> None:
        """Place a call. It is sent if there is room and nobody waits before it. Raises what `Router.select` raises."""
        router, asked = self._router, call.call
        self.room.came(call.tenant, now_s)
        passed = _passed(router, self._lines, call) if self._waiting else NOTHING_PASSED
        placement = router.select(asked, now_s, prefer=call.prefer, avoid=call.avoid, route=call.route, passed=passed)
        engine_id, line = placement.engine_id, self._lines.get(placement.engine_id)
        is_next = not line or line.is_before_all(call.tenant) or self._next_tenant(line, engine_id, now_s) is None
        call.is_sent = is_next and self._has_room(engine_id, call.tenant, now_s)
        call.booking = router.book(asked, placement, now_s, waits=not call.is_sent)
        if call.is_sent:
            self._shares.serve(call.tenant, call.tokens)
            self.room.sent(engine_id, call.tenant, now_s)

    def join(self, call: Waiting, now_s: float) -> None:
        """A placed call waits in the line of its engine."""
        engine_id = call.engine_id
        line = self._lines.get(engine_id)
        if line is None:
            line = self._lines[engine_id] = Line(self._shares, partial(_cached_share, self._router.engines))
        line.push(call)
        self._waiting += 1
        self._look_when_due(engine_id, call.tenant, now_s)

    def leave(self, call: Waiting, now_s: float) -> None:
        """A placed call is not to be sent."""
        line = self._lines.get(call.engine_id)
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
        self._lines[call.engine_id].change_rank(call, rank_of(call.call))

    def check(self, waiting: Iterable[Waiting]) -> None:
        """Assert the invariants, with the calls that are placed and wait; for tests."""
        calls = list(waiting)
        assert self._waiting == len(calls) == sum(map(len, self._lines.values()))
        assert all(call in self._lines[call.engine_id] for call in calls)
        for line in self._lines.values():
            line.check()

    # Events.

    def _on_room(self, engine_id: str) -> None:
        if self._waiting:
            self._alarms.now(engine_id)

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
        while line and (tenant := self._next_tenant(line, engine_id, now_s)) is not None:
            call = line.take(tenant)
            self._waiting -= 1
            self._send(call, now_s)
        if line:
            self._look_when_due(engine_id, line.next_tenant(), now_s)
        elif self._waiting and self._router.is_ours and self._has_room(engine_id, None, now_s):
            self._help(engine_id, now_s)

    def _next_tenant(self, line: Line[Waiting], engine_id: str, now_s: float) -> str | None:
        """The tenant that goes next: the one furthest behind, among those that there is room for; None if for none."""
        first = line.next_tenant()
        if self._has_room(engine_id, first, now_s):
            return first
        if line.tenants == 1 or not self._has_room(engine_id, None, now_s):
            return None
        return next((name for name in line.by_share() if self._has_room(engine_id, name, now_s)), None)

    def _help(self, engine_id: str, now_s: float) -> None:
        """An engine has room and nobody waits for it: the call that gains most goes there."""
        best = best_change(self._router, self._lines, engine_id, now_s)
        if best is not None and self._has_room(engine_id, best[0].tenant, now_s):
            call, placement = best
            self._shares.serve(call.tenant, call.tokens)
            self.leave(call, now_s)
            call.booking = self._router.book(call.call, placement, now_s, waits=True)
            self._send(call, now_s)
            self._on_room(engine_id)

    def _stranded(self) -> list[Waiting]:
        """The calls that wait for an engine that takes them no more, or may not take all of them."""
        self._lines = {engine_id: line for engine_id, line in self._lines.items() if line}
        eligible = self._router.models.eligible_ids() if self._lines else {}
        return [
            call
            for engine_id, line in self._lines.items()
            for call in line
            if engine_id not in eligible.get(call.call.model, ()) or engine_id in self._router.hand_over
        ]

    def _move(self, call: Waiting, now_s: float) -> None:
        """Place a call anew, if it still waits."""
        if call.booking is None or call not in self._lines.get(call.engine_id, ()):
            return
        self._shares.waits(call.tenant)  # all the time, so that its virtual time stays
        self.leave(call, now_s)
        try:
            self.place(call, now_s)
        except PlaitError as error:
            self._on_failed(call, error, now_s)
        else:
            self._on_sent(call, now_s) if call.is_sent else self.join(call, now_s)
        self._shares.left(call.tenant)

    def _send(self, call: Waiting, now_s: float) -> None:
        assert call.booking is not None
        self._router.send(call.booking, now_s)
        call.is_sent = True
        self.room.sent(call.engine_id, call.tenant, now_s)
        self._on_sent(call, now_s)

    def _has_room(self, engine_id: str, tenant: str | None, now_s: float) -> bool:
        return self.room.has(self._router.engines[engine_id].view, tenant, now_s)

    def _look_when_due(self, engine_id: str, tenant: str, now_s: float) -> None:
        """Look at an engine when there is room for the tenant as time passes."""
        self._alarms.by(engine_id, self.room.due_s(self._router.engines[engine_id].view, tenant, now_s), now_s)


def _passed(router: Router, lines: Mapping[str, Line[Waiting]], call: Waiting) -> Passed:
    """What waits behind the call if it joins now, because its tenants have had their turns."""
    shares = {engine_id: share for engine_id, line in lines.items() if (share := line.passed_share(call.tenant))}
    engines = len(router.models.able(call.call.model))
    calls = sum(share * len(lines[engine_id]) for engine_id, share in shares.items())
    return Passed(shares, calls / engines) if shares and engines else NOTHING_PASSED


def _cached_share(engines: Mapping[str, FleetEngine], call: Waiting) -> float:
    """The part of a waiting call's tokens that it would find in the cache now."""
    booking = call.booking
    assert booking is not None
    return engines[call.engine_id].ready_tokens(booking) / max(1, call.tokens)


def _takes(router: Router, call: Waiting, engine_id: str) -> bool:
    return any(view.engine_id == engine_id for view in router.models.able(call.call.model))
