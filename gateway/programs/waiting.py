"""What waits in a session, and for what: for the rest of its program, or for a variable that nobody produces so far.

An application sends all its calls together. The first call is ready before the gateway knows the calls that depend on
it, so its objective cannot be deduced yet. Without a wait, the first call of the critical path would run without an
objective, and siblings whose requests come one after another would not be one task group. So a call that could run at
once gathers: it waits a short time for the rest of its program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from plait.gateway.calls.annotations import Condition
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Getter, Session
from plait.gateway.timer import At
from plait.policy.programs.objectives import NOTHING
from plait.policy.programs.request_graph_state import CallState, Effects, VariableState
from plait.policy.types import NO_SLO

LONGEST_S: Final = 0.1
"""A session gathers for at most so long, however many calls come: some 60 ms for the requests of 16 calls from a slow
client, and less than a person notices."""


class Unproduced(NamedTuple):
    """A call or getter that waits for `variable`, which nobody produces. A native step waits for its own output."""

    session: Session
    waiter: HeldCall | Getter
    variable: str


class Holds:
    """Calls and getters that wait for a variable which nobody produces so far, each for `timeout_s`.

    So do native steps that wait for their client. A variable that has a producer once has one for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._due: OrderedDict[HeldCall | Getter, tuple[float, Session]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, session: Session, waiter: HeldCall | Getter, now_s: float) -> None:
        """It begins to wait. Nothing happens if all that it waits for has a producer."""
        self.drop(waiter)  # a native step waits for inputs, and then for its client
        if unproduced(session, waiter) is not None:
            self._due[waiter] = now_s + self._timeout_s, session

    def drop(self, waiter: HeldCall | Getter) -> None:
        """It waits no more."""
        self._due.pop(waiter, None)

    def overdue(self, now_s: float) -> list[Unproduced]:
        """Those whose time is over and that still wait for a variable without a producer. Forgets them."""
        found = []
        while self._due:
            waiter, (due_s, session) = next(iter(self._due.items()))
            if due_s > now_s:
                break
            del self._due[waiter]
            variable = unproduced(session, waiter)
            if variable is not None:
                found.append(Unproduced(session, waiter, variable))
        return found


def unproduced(session: Session, waiter: HeldCall | Getter) -> str | None:
    """The first variable that it waits for and that nobody produces; None if each has a producer.

    A native step whose inputs have values waits for its client, who has to produce its output.
    """
    if isinstance(waiter, Getter):
        names: tuple[str, ...] = (waiter.variable,)
    elif waits_for_client(session, waiter):
        return waiter.outputs[0].variable
    else:
        names = waiter.inputs
    return next((name for name in names if session.state_of(name) is VariableState.EMPTY), None)


def waits_for_client(session: Session, call: HeldCall) -> bool:
    """Whether it is a native step whose inputs have values."""
    return call.is_native and session.graph.call_state(call.call_id) is CallState.READY


def stranded(session: Session) -> tuple[list[HeldCall], list[Getter]]:
    """Those that wait for a variable which no call produces that runs or can still run.

    The client of a native step cannot send its value any more.
    """
    graph, lost = session.graph, dict[str, HeldCall]()

    def never_comes(variable: str) -> bool:
        producer = graph.producer(variable)
        return variable not in session.values and (producer is None or producer in lost)

    for node in sorted(graph.calls.values(), key=lambda node: node.rank):  # after those whose outputs it waits for
        call = session.calls[node.call_id]
        if call.is_native or any(map(never_comes, call.inputs)):
            lost[call.call_id] = call
    waiting = [getter for variable, getters in session.getters.items() if never_comes(variable) for getter in getters]
    return list(lost.values()), waiting


def untaken(session: Session, effects: Effects) -> list[HeldCall]:
    """The calls whose condition turns out not to hold with an event: its variable got a value, or they came later."""
    calls, found = session.calls, list[HeldCall]()
    if effects.variable_set is not None:
        found += [calls[node.call_id] for node in session.graph.variables[effects.variable_set].consumers]
    if effects.added in calls:
        found.append(calls[effects.added])
    return [call for call in found if call.when is not None and _is_untaken(session, call.when)]


def _is_untaken(session: Session, when: Condition) -> bool:
    value = session.values.get(when.variable)
    return value is not None and not when.holds(value)


@dataclass(slots=True)
class Moment:
    """A session gathers. `calls` wait, `known` are those of them whose objective has been deduced.

    `awaited` are inputs of calls, which had no producer when they were looked at; `seen` are those calls.
    """

    latest_s: float
    ends_s: float
    calls: dict[HeldCall, None] = field(default_factory=dict)
    known: dict[HeldCall, None] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)
    seen: set[HeldCall] = field(default_factory=set)

    def look_at(self, session: Session, call: HeldCall) -> None:
        """Note which inputs of a call nobody produces yet."""
        if call not in self.seen:
            self.seen.add(call)
            self.awaited.update(name for name in call.inputs if session.state_of(name) is VariableState.EMPTY)

    def is_whole(self, session: Session) -> bool:
        """Whether each noted input has a producer now. Until then, more of the program is to come."""
        while self.awaited:
            name = self.awaited.pop()
            if session.state_of(name) is VariableState.EMPTY:
                self.awaited.add(name)
                return False
        return True


class Gathering:
    """The sessions that gather, each until `moment_s` after the latest call that came, or `LONGEST_S` after the first.

    Then `end` is called with those that have waited (0: no call gathers).
    """

    def __init__(self, moment_s: float, at: At, end: Callable[[Session, list[HeldCall], float], None]) -> None:
        self._moment_s = moment_s
        self._at = at
        self._end = end
        self._moments: dict[Session, Moment] = {}
        self._homes: dict[HeldCall, Session] = {}

    def arrived(self, session: Session, call: HeldCall, now_s: float) -> None:
        """A call has come. If its session gathers, it goes on gathering."""
        moment = self._moments.get(session)
        if moment is not None:
            moment.ends_s = min(now_s + self._moment_s, moment.latest_s)
            moment.look_at(session, call)

    def takes(self, session: Session, call: HeldCall, now_s: float) -> bool:
        """Start gathering a call that is ready on arrival, if it has outputs and more of its program is to come.

        More is to come if nobody has said what the call is for, or if a call that needs its output needs others that
        nobody produces yet. A native step needs no objective, so it does not gather. Returns whether the call gathers.
        """
        if not self._moment_s or not call.outputs or call.is_native:
            return False
        if call.objective is not None or call.slo not in (None, NO_SLO):
            return False
        deduction = session.deductions.of(call.call_id)
        is_open = deduction.is_guess or deduction == NOTHING
        consumers = [session.calls[call_id] for call_id in session.graph.consumers(call.call_id)]
        if not is_open and not consumers:
            return False
        before = self._moments.get(session)
        moment = before or Moment(now_s + max(LONGEST_S, self._moment_s), now_s + self._moment_s)
        for consumer in consumers:
            moment.look_at(session, consumer)
        if not is_open and moment.is_whole(session):
            return False
        if before is None:
            self._moments[session] = moment
            self._at(moment.ends_s, partial(self._over, session, moment))
        (moment.calls if is_open else moment.known)[call] = None
        self._homes[call] = session
        return True

    def joined(self, session: Session, changed: Iterable[str]) -> list[HeldCall]:
        """The session's calls that need not gather any more, as their deductions `changed` and are no guess.

        They gather nevertheless until all that the calls behind them need has a producer.
        """
        moment = self._moments.get(session)
        if moment is None:
            return []
        calls = [call for call_id in changed if (call := session.calls.get(call_id)) in moment.calls]
        for call in calls:
            if not session.deductions.of(call.call_id).is_guess:
                del moment.calls[call]
                moment.known[call] = None
        if not moment.known or not moment.is_whole(session):
            return []
        return self._ended(session, moment, list(moment.known))

    def drop(self, call: HeldCall) -> None:
        """Forget a call that has ended, whether it gathered or not."""
        session = self._homes.get(call)
        if session is not None:
            self._ended(session, self._moments[session], [call])

    def _ended(self, session: Session, moment: Moment, calls: Sequence[HeldCall]) -> list[HeldCall]:
        """These calls do not gather any more."""
        for call in calls:
            moment.calls.pop(call, None)
            moment.known.pop(call, None)
            del self._homes[call]
        if not (moment.calls or moment.known):
            del self._moments[session]
        return list(calls)

    def _over(self, session: Session, moment: Moment, now_s: float) -> None:
        if self._moments.get(session) is not moment:
            return
        if now_s < moment.ends_s:
            self._at(moment.ends_s, partial(self._over, session, moment))
        else:
            self._end(session, self._ended(session, moment, [*moment.known, *moment.calls]), now_s)
