"""The lines before the engines: a call is placed when it arrives, and sent when its engine has room for it.

A synchronous core: each event carries its time. In: a call arrives (`place`, then `join` if it was not sent) or leaves
(`leave`), the router says that an engine may have room, and the fleet changes. Out: `Router.send`, and `on_sent` or
`on_failed`. Each event that may make room sets an alarm, and the alarm sends what fits (`_serve`).

An engine gets only some seconds of prompts, enough to stay busy (`Room`). Further calls would queue in the engine,
where the gateway can neither reorder nor move them. While several tenants are active, an engine gets less, so that a
tenant with few calls overtakes the others in the gateway's line. A call that the engine itself serves first (it can
still meet its deadline, or is small) does not wait in the line.

If an engine has room and an empty line, it takes over a call from another engine's line (`_help`). If an engine stops
taking calls, its line is placed again (`Moves`). See docs/design/admission.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from math import inf
from typing import Final

from plait.backends.errors import PlaitError
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.room import Room, backlog_s
from plait.gateway.admission.tenants import TenantUse
from plait.gateway.admission.waits import Firsts, LineChange, WaitReason
from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.router import Router
from plait.gateway.timed_events import At
from plait.policy.admission.fair_shares import FairShares
from plait.policy.admission.line import MAY_PASS, Line
from plait.policy.costs.delay import CallToPlace, change_gain_s
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.prefill_queue import Precedence
from plait.policy.costs.situation import NONE_OVERTAKEN, Overtaken
from plait.policy.order import rank_of
from plait.policy.types import Placement

LEAST_PAUSE_S = 0.005
"""The least time between two timed looks at an engine."""

MOVED_AT_ONCE: Final = 32
"""How many calls are placed again in one turn of the event loop: about 3 ms."""

LINES = 4
"""An engine that takes over a call looks at this many of the longest lines."""

CALLS = 16
"""The last calls of each line that are looked at: they wait longest. 64 gains take about a millisecond."""

LEAST_GAIN_S = 1.0
"""A smaller predicted gain is not worth the risk that the prediction is wrong."""

PASSING = 8
"""How many calls of a tenant are checked for one that may overtake. The next check takes the tenant's other calls."""

Look = Callable[[str, float], None]
Sent = Callable[[Waiting, float], None]
Failed = Callable[[Waiting, PlaitError, float], None]


class Lines:
    """The placed calls that wait, in a line for each engine.

    `uses` counts each tenant's placed calls. `ahead_s` is as in `Room`. `on_sent` is called with a waiting call that
    was sent, and `on_failed` with one that no engine takes any more.
    """

    def __init__(
        self,
        router: Router,
        at: At,
        shares: FairShares,
        uses: Mapping[str, TenantUse],
        ahead_s: float,
        *,
        on_sent: Sent,
        on_failed: Failed,
    ) -> None:
        self._router = router
        self._at = at
        self._shares = shares
        self._uses = uses
        self.room = Room(ahead_s, shares)
        self._on_sent = on_sent
        self._on_failed = on_failed
        self._lines: dict[str, Line[Waiting]] = {}
        self._firsts = Firsts()
        self._alarms = Alarms(at, self._serve)
        moves = Moves(at, self._stranded, self._move, lambda: self._alarms.all(router.engines))
        router.on_room, router.models.on_change = self._alarms.now, lambda: moves.soon() if router.waiting else None
        shares.on_earlier = self._on_earlier

    def place(self, call: Waiting, now_s: float) -> None:
        """Place a call, and send it if its engine has room and no call goes first. Raises as `Router.select` does."""
        router, asked = self._router, call.call
        self.room.active.came(call.tenant, now_s)
        overtaken = self._overtaken(call, now_s) if router.waiting else NONE_OVERTAKEN
        placement = router.select(
            asked,
            now_s,
            prefer=call.prefer,
            avoid=call.avoid,
            route=call.route,
            overtaken=overtaken,
        )
        engine_id, line = placement.engine_id, self._lines.get(placement.engine_id)
        view = router.engines[engine_id].view
        due_s = view.due_s(asked, placement.cached_tokens, now_s) if asked.slo else -inf
        if line:
            why = self._joining_waits_for(line, engine_id, call.tenant, due_s, now_s)
        else:
            why = self.room.waits_for(view, call.tenant, now_s, due_s=due_s)
        call.is_sent = why is None
        self.room.came(engine_id, call.tenant, now_s)
        call.booking = router.book(asked, placement, now_s, waits=not call.is_sent, tenant=call.tenant)
        if why is not None:
            call.find_rank()
            call.precedence = self._expected(call, now_s)
            if self._may_pass(call, now_s):
                router.send(call.booking, now_s)
                call.is_sent = True
                if line:
                    line.passed(call)
            else:
                call.wait_for(why, now_s)
        self._uses[call.tenant].running += 1
        if call.is_sent:
            self._shares.serve(call.tenant, call.tokens)
            self.room.fill(engine_id, call.tenant, call.tokens, now_s)

    def send_line(self, call: Waiting, now_s: float) -> None:
        """Send a line of a batch, which counts for nothing that other calls are judged by. Raises as `place` does."""
        asked = call.call
        placement = self._router.select(asked, now_s, prefer=call.prefer, avoid=call.avoid, route=call.route)
        call.booking = self._router.book(asked, placement, now_s, tenant=call.tenant)
        call.is_sent = True
        self._uses[call.tenant].running += 1

    def unsend_line(self, call: Waiting, now_s: float) -> None:
        """A line was given up before its engine got it."""
        call.is_sent = False
        self._uses[call.tenant].running -= 1
        self._release(call, now_s)

    def join(self, call: Waiting, now_s: float) -> None:
        """A placed call waits in the line of its engine."""
        engine_id = call.engine_id
        line = self._lines.get(engine_id)
        if line is None:
            line = self._lines[engine_id] = Line(self._shares, partial(_cached_share, self._router.engines))
        line.push(call)
        self._look_when_near(call, now_s)
        self._router.waiting += 1
        self._look_when_due(engine_id, line, call.tenant, now_s)

    def unsent(self, call: Waiting, now_s: float) -> None:
        """The client of a call has gone after `on_sent`, but before the engine got the call."""
        call.is_sent = False
        self.room.left(call.engine_id, call.tenant)
        self._uses[call.tenant].running -= 1
        self._release(call, now_s)

    def leave(self, call: Waiting, now_s: float) -> None:
        """A placed call will not be sent."""
        self._uses[call.tenant].running -= 1
        line = self._lines.get(call.engine_id)
        if line is not None and call in line:
            if line.next_call(call.tenant) is call:
                call.wait_for_all(self._firsts.taken(call.engine_id, call.tenant))
            line.remove(call)
            self._router.waiting -= 1
        self._release(call, now_s)

    def refine(self, call: Waiting, now_s: float) -> None:
        """The objectives of a waiting call have changed, and with them its place in the line."""
        assert call.booking is not None
        self._router.refine(call.booking, call.call, now_s)
        rank = rank_of(call.call.slo, call.call.objective)
        self._lines[call.engine_id].change(call, rank, self._expected(call, now_s))
        self._alarms.now(call.engine_id)
        self._look_when_near(call, now_s)

    # Events.

    def _look_when_near(self, call: Waiting, now_s: float) -> None:
        """A waiting call whose TTFT is far may pass others once it is near."""
        if call.call.nears_s > now_s:
            self._at(call.call.nears_s, partial(self._nears, call))

    def _nears(self, call: Waiting, now_s: float) -> None:
        if call.booking is not None and call in self._lines.get(call.engine_id, ()):
            self.refine(call, now_s)

    def _release(self, call: Waiting, now_s: float) -> None:
        assert call.booking is not None
        self._router.release(call.booking, now_s, delivered=False)
        call.released, call.booking = call.booking, None

    def _overtaken(self, call: Waiting, now_s: float) -> Overtaken:
        """The waiting calls that the call would overtake by fair shares if it joined now."""
        tenant, lines = call.tenant, self._lines.items()
        found = {engine_id: one for engine_id, line in lines if (one := line.overtaken(tenant))}
        engines = self._router.models.able(call.call.model)
        if not found or not engines:
            return NONE_OVERTAKEN
        calls = sum(one.calls for one in found.values())
        return Overtaken(found, calls / len(engines), self._sent_weight(engines, tenant, now_s))

    def _sent_weight(self, engines: Collection[EngineView], tenant: str, now_s: float) -> float:
        """`Overtaken.sent_weight` of a new call of the tenant that goes to one of these engines."""
        own = 1 + sum(self.room.sent.get((view.engine_id, tenant), 0) for view in engines)
        own += sum(line.waiting(tenant) for view in engines if (line := self._lines.get(view.engine_id)))
        every = 1 + sum(view.outstanding for view in engines)
        return min(1.0, own / (self.room.active.share(tenant, now_s) * every))

    def _on_earlier(self, tenant: str) -> None:
        for line in self._lines.values():
            line.earlier(tenant)

    def _serve(self, engine_id: str, now_s: float) -> None:
        """Send what an engine has room for. With an empty line, it may take over a call from another engine's."""
        if engine_id not in self._router.engines:
            return
        line = self._lines.get(engine_id)
        if line and not _takes(self._router, next(iter(line)), engine_id):
            return  # the engine takes no calls: `Moves` places its line again
        while line and (call := self._take_next(line, engine_id, now_s)) is not None:
            self._router.waiting -= 1
            self._send(call, now_s)
        if line:
            self._look_when_due(engine_id, line, line.next_tenant(), now_s)
        elif self._router.waiting and self._router.policy.moves_waiting:
            self._help(engine_id, now_s)

    def _take_next(self, line: Line[Waiting], engine_id: str, now_s: float) -> Waiting | None:
        """Take the call to send next out of the line; None if the engine has no room for any."""
        tenant = self._next_tenant(line, engine_id, now_s)
        if tenant is not None:
            taken = self._small_first(line, tenant, now_s)
            if taken is None:
                taken = line.take(tenant)
            else:
                line.serve(taken)
            taken.wait_for_all(self._firsts.taken(engine_id, tenant))
            return taken
        call = self._passing(line, engine_id, now_s)
        if call is not None:
            line.serve(call)
        return call

    def _next_tenant(self, line: Line[Waiting], engine_id: str, now_s: float) -> str | None:
        """The tenant that is furthest behind among those whose next call has room; None if none has."""
        first = line.next_tenant()
        why = self._turn_waits_for(line, engine_id, first, now_s)
        if why is None:
            return first
        self._firsts.wait_for(engine_id, first, why, now_s)
        if line.tenants == 1:
            return None
        others = line.by_share()
        return next((name for name in others if self._turn_waits_for(line, engine_id, name, now_s) is None), None)

    def _turn_waits_for(self, line: Line[Waiting], engine_id: str, tenant: str, now_s: float) -> WaitReason | None:
        """What the next call of a tenant waits for if it is the tenant's turn; None: there is room."""
        due_s = self._due_s(line.next_call(tenant), now_s)
        return self.room.waits_for(self._router.engines[engine_id].view, tenant, now_s, due_s=due_s)

    def _joining_waits_for(
        self, line: Line[Waiting], engine_id: str, tenant: str, due_s: float, now_s: float
    ) -> WaitReason | None:
        """What an arriving call waits for at a line that is not empty; None: it is sent at once."""
        is_first = line.is_before_all(tenant)
        if not is_first and self._next_tenant(line, engine_id, now_s) is not None:
            return "turn"
        why = self.room.waits_for(self._router.engines[engine_id].view, tenant, now_s, due_s=due_s)
        return why if is_first or why is None else "turn"

    def _passing(self, line: Line[Waiting], engine_id: str, now_s: float) -> Waiting | None:
        """The call that overtakes the line; None if none may."""
        view = self._router.engines[engine_id].view
        for precedence in MAY_PASS:
            for tenant in line.having(precedence):
                if self.room.waits_for(view, tenant, now_s, precedence) is None:
                    for call in line.first(tenant, precedence, PASSING):
                        if precedence is Precedence.ON_TIME:
                            line.change(call, call.rank, self._expected(call, now_s))
                        if call.precedence is precedence and self._may_pass(call, now_s):
                            return call
                        line.look_later(call)
        return None

    def _small_first(self, line: Line[Waiting], tenant: str, now_s: float) -> Waiting | None:
        """The small call that goes first in a tenant's turn; None if none does."""
        for call in line.first_small(tenant, PASSING):
            if self._is_still(call, now_s):
                return call
            line.look_later(call)
        return None

    def _is_still(self, call: Waiting, now_s: float) -> bool:
        """Whether a placed call's prompt has its precedence with what is cached, or computed before it, by now."""
        assert call.booking is not None
        engine = self._router.engines[call.engine_id]
        return engine.view.precedence(call.call, engine.ready_tokens(call.booking, now_s), now_s) is call.precedence

    def _expected(self, call: Waiting, now_s: float) -> Precedence:
        """The precedence of a placed call's prompt, by the cached tokens that its placement expects."""
        assert call.booking is not None
        view, cached_tokens = self._router.engines[call.engine_id].view, call.booking.placement.cached_tokens
        return view.precedence(call.call, cached_tokens, now_s)

    def _due_s(self, call: Waiting, now_s: float) -> float:
        """The deadline of a waiting call's prompt; -inf without one that can still be met."""
        assert call.booking is not None
        view = self._router.engines[call.engine_id].view
        return view.due_s(call.call, call.booking.placement.cached_tokens, now_s)

    def _may_pass(self, call: Waiting, now_s: float) -> bool:
        """Whether a placed call overtakes the line of its engine."""
        booking, line, precedence = call.booking, self._lines.get(call.engine_id), call.precedence
        assert booking is not None
        engine = self._router.engines[call.engine_id]
        ready_tokens = engine.ready_tokens(booking, now_s)
        if engine.view.precedence(call.call, ready_tokens, now_s) is not precedence:
            return False
        if precedence is Precedence.REST or (line and not self._is_let_pass(line, call, now_s)):
            return False
        due_s = engine.view.due_s(call.call, ready_tokens, now_s)
        return self.room.waits_for(engine.view, call.tenant, now_s, precedence, due_s=due_s) is None

    def _is_let_pass(self, line: Line[Waiting], call: Waiting, now_s: float) -> bool:
        """Whether fairness allows a call to overtake the line.

        Of a tenant over its share, small calls may not, and those on time overtake only calls of their own tenant, and
        no earlier urgent one.
        """
        is_over = self.room.is_over(call.tenant, now_s)
        if call.precedence is Precedence.SMALL:
            return not is_over and line.lets_pass(call)
        return not is_over or (line.is_of(call.tenant) and line.first_urgent(call.tenant) in {None, call})

    def _help(self, engine_id: str, now_s: float) -> None:
        """An engine has an empty line: if it has room for a last prompt, the call that gains most moves there."""
        view = self._router.engines[engine_id].view
        if not self.room.has_last(view, None, now_s):
            return
        best = _best_change(self._router, self._lines, engine_id, now_s)
        if best is not None and self.room.has_last(view, best[1].tenant, now_s):
            gain_s, call, placement = best
            call.line_changes += (LineChange(call.engine_id, engine_id, now_s, gain_s),)
            self._shares.serve(call.tenant, call.tokens)  # before `leave`, while the tenant counts as waiting
            self.leave(call, now_s)
            call.booking = self._router.book(call.call, placement, now_s, waits=True, tenant=call.tenant)
            self._uses[call.tenant].running += 1
            self._send(call, now_s)
            if self._router.waiting:
                self._alarms.now(engine_id)

    def _stranded(self) -> list[Waiting]:
        """The calls whose engines no longer take them, or drain."""
        self._lines = {engine_id: line for engine_id, line in self._lines.items() if line}
        return [
            call
            for engine_id, line in self._lines.items()
            for call in line
            if engine_id in self._router.hand_over or not _takes(self._router, call, engine_id)
        ]

    def _move(self, call: Waiting, now_s: float) -> None:
        """Place a call again, if it still waits."""
        if call.booking is None or call not in self._lines.get(call.engine_id, ()):
            return
        self._shares.waits(call.tenant)  # the tenant never stops waiting, so it keeps its virtual time
        from_id = call.engine_id
        self.leave(call, now_s)
        try:
            self.place(call, now_s)
        except PlaitError as error:
            self._on_failed(call, error, now_s)
        else:
            if call.engine_id != from_id:
                call.line_changes += (LineChange(from_id, call.engine_id, now_s, None),)
            self._on_sent(call, now_s) if call.is_sent else self.join(call, now_s)
        self._shares.left(call.tenant)

    def _send(self, call: Waiting, now_s: float) -> None:
        assert call.booking is not None
        self._router.send(call.booking, now_s)
        call.is_sent = True
        self.room.active.came(call.tenant, now_s)
        self.room.fill(call.engine_id, call.tenant, call.tokens, now_s)
        self._on_sent(call, now_s)

    def _look_when_due(self, engine_id: str, line: Line[Waiting], tenant: str, now_s: float) -> None:
        """Set an alarm for the time at which the tenant's next call has room without a further event."""
        due_s, view = self._due_s(line.next_call(tenant), now_s), self._router.engines[engine_id].view
        self._alarms.by(engine_id, self.room.due_s(view, tenant, now_s, due_s=due_s), now_s)


def _cached_share(engines: Mapping[str, FleetEngine], call: Waiting) -> float:
    """The part of a waiting call's tokens that are cached now. At the time `inf`, no tier's link is busy."""
    booking = call.booking
    assert booking is not None
    return engines[call.engine_id].ready_tokens(booking, inf) / max(1, call.tokens)


def _takes(router: Router, call: Waiting, engine_id: str) -> bool:
    return router.models.takes(call.call, engine_id, call.route)


def _best_change(
    router: Router, lines: Mapping[str, Line[Waiting]], engine_id: str, now_s: float
) -> tuple[float, Waiting, Placement] | None:
    """(gain in seconds, call, placement) of the call that gains most by moving to an idle engine; None: none gains
    more than `LEAST_GAIN_S`.
    """
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
    return best


def _candidates(router: Router, engine_id: str, line: Line[Waiting], now_s: float) -> Iterator[tuple[Waiting, float]]:
    """(call, seconds of work before it) for the last calls of a line."""
    view = router.engines[engine_id].view
    ahead_s = backlog_s(view, now_s) + view.slowness * line.work_s
    for call in line.latest(CALLS):
        ahead_s -= view.slowness * call.work_s
        yield call, max(0.0, ahead_s)


def _may_go(router: Router, call: Waiting, engine_id: str) -> bool:
    """Whether a call may move to an engine. A call that continues another one stays where that one ran."""
    if call.prefer is not None or engine_id in call.avoid or engine_id in router.hand_over:
        return False
    return _takes(router, call, engine_id)


def _gain_s(router: Router, booking: Booking, ahead_s: float, engine_id: str, now_s: float) -> tuple[float, Placement]:
    """(gain in seconds, placement) if a waiting call moves to an engine."""
    call, there = booking.call, router.engines[booking.placement.engine_id].view
    able, path = router.models.able(call.model), router.tree.match(call.block_hashes)
    situation = router.demand.situation(call, path, able, now_s)._replace(engines=[router.engines[engine_id].view])
    waits = booking.placement.cached_tokens // call.block_tokens, booking.leaf
    return change_gain_s(CallToPlace.of(call, situation), situation, there, ahead_s, waits)


class Alarms:
    """Calls `look(engine_id, now_s)` after events that may make room, and at times at which there may be room.

    A look runs in a later turn of the event loop, so that it sees the state after the whole event.
    """

    def __init__(self, at: At, look: Look) -> None:
        self._at = at
        self._look = look
        self._news: dict[str, None] = {}
        self._due: dict[str, float] = {}

    def now(self, engine_id: str) -> None:
        """Look at an engine after the current event."""
        self.all([engine_id])

    def all(self, engine_ids: Iterable[str]) -> None:
        """Look at these engines after the current event."""
        is_new = not self._news
        self._news.update(dict.fromkeys(engine_ids))
        if is_new and self._news:
            self._at(0.0, self._look_at_news)

    def by(self, engine_id: str, when_s: float, now_s: float) -> None:
        """Look at an engine at `when_s`, unless an earlier look is due; infinite: no look."""
        when_s = max(when_s, now_s + LEAST_PAUSE_S)
        if when_s < self._due.get(engine_id, inf):
            self._due[engine_id] = when_s
            self._at(when_s, lambda at_s: self._is_due(engine_id, at_s))

    def _look_at_news(self, now_s: float) -> None:
        engines, self._news = self._news, {}
        for engine_id in engines:
            self._look(engine_id, now_s)

    def _is_due(self, engine_id: str, now_s: float) -> None:
        if self._due.get(engine_id, inf) <= now_s:
            del self._due[engine_id]
            self._look(engine_id, now_s)


class Moves:
    """Moves the calls of engines that no longer take them, `MOVED_AT_ONCE` in each turn of the event loop.

    Calls `move` with each stranded call in the order of arrival, then `on_done`.
    """

    def __init__(
        self,
        at: At,
        stranded: Callable[[], list[Waiting]],
        move: Callable[[Waiting, float], None],
        on_done: Callable[[], None],
    ) -> None:
        self._at = at
        self._stranded = stranded
        self._move = move
        self._on_done = on_done
        self._is_due = False

    def soon(self) -> None:
        """Look for calls to move after the current event."""
        if not self._is_due:
            self._is_due = True
            self._at(0.0, self._begin)

    def _begin(self, now_s: float) -> None:
        self._is_due = False
        self._go_on(sorted(self._stranded(), key=lambda call: -call.number), now_s)

    def _go_on(self, calls: list[Waiting], now_s: float) -> None:
        """Move the last `MOVED_AT_ONCE` of these calls now, and the rest in later turns."""
        for call in [calls.pop() for _ in calls[:MOVED_AT_ONCE]]:
            self._move(call, now_s)
        if calls:
            self._at(0.0, partial(self._go_on, calls))
        else:
            self._on_done()
