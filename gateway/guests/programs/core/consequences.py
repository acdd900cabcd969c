"""The consequences of a change in a session's graph: getters are answered, calls run, and unwanted calls end.

`Consequences.apply` gets the `Effects` of a graph event, brings the session up to date, and only then runs callbacks.

`Gathering` delays calls that are ready on arrival for a short time. An application sends all its calls together, but
the first one is ready before the gateway has read the calls that depend on it, so no objective can be deduced for it
yet. Without the delay, the first call of a critical path would run without an objective, and siblings whose requests
arrive one after another would not be one task group.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from plait.backends.errors import PlaitError
from plait.gateway.calls.condition import Condition
from plait.gateway.guests.programs.core.held_call import HeldCall, ReadyCall
from plait.gateway.guests.programs.core.session import Getter, Session, begun, promised
from plait.gateway.guests.programs.core.session_errors import (
    UNWANTED,
    cancelled,
    input_failed,
    is_skip,
    skip_cause,
    variable_failed,
)
from plait.gateway.guests.programs.core.sessions import Holds
from plait.gateway.timed_events import At, Event
from plait.policy.programs.needs import Mark
from plait.policy.programs.objectives import NOTHING
from plait.policy.programs.request_graph_state import Cause, Effects, VariableState
from plait.policy.types import CHARACTERS_PER_TOKEN, NO_SLO


class Prediction(Protocol):
    """Predicts the seconds that a call takes alone on an engine."""

    def __call__(self, model: str, prompt_tokens: int, output_limit: int | None, /, *, in_group: bool = False) -> float:
        """`in_group`: assume the mean output of calls of task groups instead of the limit."""


LONGEST_S: Final = 0.1
"""The longest time that a session gathers: more than the 60 ms in which a slow client sends 16 calls, and less than a
person notices."""

AT_ONCE: Final = 64
"""The most calls that one event starts, fails or cancels before it yields to the event loop: 5 ms of work at most."""

T = TypeVar("T")


class Job(NamedTuple):
    """A job that a getter waited for: from the arrival of its first call to the value, in seconds."""

    tenant: str
    seconds: float
    mark: Mark | None


BrokenCall = tuple[HeldCall, Cause]
"""A call that was ended by others, and why."""


@dataclass(slots=True)
class Moment:
    """One session while it gathers."""

    latest_s: float
    """The time after which `ends_s` is not extended."""
    ends_s: float
    calls: dict[HeldCall, None] = field(default_factory=dict)
    """Ready calls without an objective so far."""
    known: dict[HeldCall, None] = field(default_factory=dict)
    """Ready calls with a deduced objective, which wait for their consumers' other inputs."""
    awaited: set[str] = field(default_factory=set)
    """Inputs of the calls in `seen` that had no producer when last checked."""
    seen: set[HeldCall] = field(default_factory=set)

    def look_at(self, session: Session, call: HeldCall) -> None:
        """Note which inputs of a call have no producer yet."""
        if call not in self.seen:
            self.seen.add(call)
            self.awaited.update(name for name in call.inputs if session.state_of(name) is VariableState.EMPTY)

    def is_whole(self, session: Session) -> bool:
        """Whether each noted input has a producer now. If not, the client has not sent the whole program yet."""
        while self.awaited:
            name = self.awaited.pop()
            if session.state_of(name) is VariableState.EMPTY:
                self.awaited.add(name)
                return False
        return True


class Gathering:
    """The sessions that gather: each until `moment_s` after its latest call, at most `LONGEST_S` after its first.

    `end` is then called with the calls that gathered. With a `moment_s` of 0, no call gathers.
    """

    def __init__(self, moment_s: float, at: At, end: Callable[[Session, list[HeldCall], float], None]) -> None:
        self._moment_s = moment_s
        self._at = at
        self._end = end
        self._moments: dict[Session, Moment] = {}
        self._homes: dict[HeldCall, Session] = {}

    def arrived(self, session: Session, call: HeldCall, now_s: float) -> None:
        """A call was added. If its session gathers, it gathers for another `moment_s`."""
        moment = self._moments.get(session)
        if moment is not None:
            moment.ends_s = min(now_s + self._moment_s, moment.latest_s)
            moment.look_at(session, call)

    def takes(
        self, session: Session, call: HeldCall, consumers: Sequence[HeldCall], now_s: float, *, is_deduced: bool
    ) -> bool:
        """Make a call that is ready on arrival gather, if more of its program is likely to follow. Returns whether.

        More is to follow if no objective can be deduced for the call yet, or if one of the `consumers` of its output
        has another input without a producer. `is_deduced` says that the call has a deduction. A call with an objective
        of its own does not gather, nor does a native step, which needs none.
        """
        if not self._moment_s or not call.outputs or call.is_native:
            return False
        if call.objective is not None or call.slo not in (None, NO_SLO):
            return False
        deduction = session.deductions.of(call.call_id) if is_deduced else NOTHING
        is_open = deduction.is_guess or deduction == NOTHING
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
        """The gathering calls that may run, after the deductions of `changed` calls were made or revised.

        A call with a deduction that is no guess still gathers until all noted inputs have producers.
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
        """Forget a call that has ended. It need not gather."""
        session = self._homes.get(call)
        if session is not None:
            self._ended(session, self._moments[session], [call])

    def _ended(self, session: Session, moment: Moment, calls: Sequence[HeldCall]) -> list[HeldCall]:
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


class Continuations:
    """The rests of large events: a synchronous core continues them in later iterations of the event loop."""

    def __init__(self, at: At) -> None:
        self._at = at
        self._left = deque[Event]()

    def add(self, event: Event, now_s: float) -> None:
        self._left.append(event)
        self._at(now_s, self._next)

    def each(self, items: Sequence[T], do: Callable[[T], object], now_s: float) -> None:
        """Call `do` with each item: with the first `AT_ONCE` now, with the others in later events."""
        for item in items[:AT_ONCE]:
            do(item)
        rest = items[AT_ONCE:]
        if rest:
            self.add(lambda now_s: self.each(rest, do, now_s), now_s)

    def finish(self, now_s: float) -> None:
        """Run all that is left now."""
        while self._left:
            self._next(now_s)

    def _next(self, now_s: float) -> None:
        if self._left:
            self._left.popleft()(now_s)


class Consequences:
    """The part of the executor that applies a graph's `Effects`, and then runs the callbacks."""

    def __init__(
        self, predicted_s: Prediction, gather_s: float, hold_s: float, at: At, on_job: Callable[[Job], None]
    ) -> None:
        self.homes: dict[HeldCall, Session] = {}  # the session of each call that has not ended
        self.holds = Holds(hold_s)
        self.variables = Counter[str]()  # numbers of variables "set", "failed" and "skipped" so far
        self.continuations = Continuations(at)
        self._predicted_s = predicted_s
        self._on_job = on_job
        self._gathering = Gathering(gather_s, at, self.run)
        self._entering: dict[Session, list[HeldCall]] = {}  # calls that became ready while their program enters
        self._to_look_at: list[HeldCall] = []  # calls that may be unwanted
        self._cancelling = False

    def predict(self, call: HeldCall, input_characters: int = 0) -> None:
        """Predict the call's duration. `input_characters` is the total length of its inputs' values."""
        if call.native_s is not None:
            call.predicted_s = call.native_s
            return
        tokens = call.prompt_tokens + input_characters // CHARACTERS_PER_TOKEN
        call.predicted_s = self._predicted_s(call.model, tokens, call.output_tokens)
        call.in_group_s = self._predicted_s(call.model, tokens, call.output_tokens, in_group=True)

    def apply(self, session: Session, effects: Effects, deduced: Iterable[str], now_s: float) -> None:
        """Bring the session up to date with an event of its graph, then call getters and owners.

        `deduced` are the calls whose objectives the event changed. Calls whose conditions the event decides, and which
        do not hold, are skipped with it.
        """
        events, changed, broken = [effects], dict.fromkeys(deduced), list[BrokenCall]()
        self._update(session, effects, changed, broken)
        for call in untaken(session, effects):
            if call in self.homes:
                skipped, others = session.end_call(call, skip_cause(call), "cancelled", now_s)
                changed |= dict.fromkeys(others)
                events.append(skipped)
                self._update(session, skipped, changed, broken)
        session.account()
        calls = self._to_tell(session, effects, changed, now_s)
        promises = self._promised(session, calls[:AT_ONCE], now_s) if calls else []
        for event in events:
            self._answer_getters(session, event, now_s)
        if broken:
            self.continuations.each(broken, _break_off, now_s)
        if calls:
            self._tell(promises, now_s)
            self._run_later(session, calls[AT_ONCE:], now_s)
        cut = [link.producer for event in events if event.ended for link in event.cut]
        if cut:
            self.cancel_unwanted([session.calls[call_id] for call_id in cut if call_id in session.calls], now_s)

    def _update(self, session: Session, effects: Effects, changed: dict[str, None], broken: list[BrokenCall]) -> None:
        """Update the session's state. Adds to `changed` (deductions) and `broken` (calls ended by others)."""
        added = None if effects.added is None else session.calls.get(effects.added)
        if added is not None and added.objective is not None:
            changed |= dict.fromkeys(session.deductions.annotate(added.call_id, added.objective))
        if effects.variable_set is not None:
            self.variables["set"] += 1
        for variable, cause in effects.variables_failed:
            self.variables["skipped" if is_skip(cause) else "failed"] += 1
            session.fail_output(variable)
        for call_id, _, why in effects.ended:
            call = session.calls.get(call_id)
            if call is not None:
                self.drop(call)
                if why is not None:
                    broken.append((call, why))

    def _to_tell(self, session: Session, effects: Effects, changed: Mapping[str, None], now_s: float) -> list[HeldCall]:
        """The calls that may start now and do not gather, and running calls whose objectives may have changed.

        The SLO of a call that may start counts from `now_s` (docs/design/clocks.md).
        """
        added = effects.added
        if added in session.calls:
            self._gathering.arrived(session, session.calls[added], now_s)
        calls = self._gathering.joined(session, changed)
        if added is not None:  # only a new call changes what running calls are for; an end does not
            calls += begun(session, changed)
        for call_id in effects.ready:
            call = session.calls.get(call_id)
            if call is None:
                continue
            call.ready_s = now_s
            if call.inputs:
                self.predict(call, sum([len(session.values[name]) for name in call.inputs]))
            if call_id == added and session not in self._entering:
                consumers = [session.calls[link.consumer] for link in effects.linked if link.producer == added]
                if self._gathering.takes(session, call, consumers, now_s, is_deduced=call_id in changed):
                    continue
            calls.append(call)
        return calls

    @contextmanager
    def entering(self, session: Session, now_s: float) -> Iterator[None]:
        """Enter a part of a program in the block. Calls that become ready in it run after it.

        Their objectives are then deduced from the whole program, so they do not gather. Running calls are refined.
        """
        self._entering[session] = []
        try:
            yield
        finally:
            calls = dict.fromkeys(self._entering.pop(session))
            self.run(session, [call for call in calls if call in self.homes], now_s)

    def run(self, session: Session, calls: Sequence[HeldCall], now_s: float) -> None:
        """Start ready calls with their objectives, and refine the objectives of running calls."""
        self._tell(self._promised(session, calls[:AT_ONCE], now_s), now_s)
        self._run_later(session, calls[AT_ONCE:], now_s)

    def _run_later(self, session: Session, calls: Sequence[HeldCall], now_s: float) -> None:
        """Run these calls with the next event, but for those that have ended by then."""
        if calls:
            self.continuations.add(
                lambda now_s: self.run(session, [one for one in calls if one in self.homes], now_s), now_s
            )

    def marked(self, session: Session, changed: Iterable[str], now_s: float) -> None:
        """The deductions of these calls changed: gathering calls may run, and running calls are refined."""
        changed = dict.fromkeys(changed)
        self.run(session, [*self._gathering.joined(session, changed), *begun(session, changed)], now_s)

    def forget_absent(self, calls: Sequence[HeldCall], now_s: float) -> None:
        """The grace period of one client of each of these calls is over."""
        for call in calls:
            call.give_up()
        self.cancel_unwanted(calls, now_s)

    def cancel_unwanted(self, calls: Iterable[HeldCall], now_s: float) -> None:
        """Cancel each of `calls` that no client, call or getter waits for, and then its unwanted producers."""
        self._to_look_at += calls
        if self._cancelling:
            return  # `apply` came back here: the loop below takes the calls, as recursion along a chain is too deep
        self._cancelling = True
        try:
            for _ in range(AT_ONCE):
                if not self._to_look_at:
                    return
                call = self._to_look_at.pop()
                session = self.homes.get(call)
                if session is not None and _is_unwanted(session, call):
                    self.apply(session, *session.end_call(call, UNWANTED, "cancelled", now_s), now_s)
            self.continuations.add(partial(self.cancel_unwanted, ()), now_s)
        finally:
            self._cancelling = False

    def drop(self, call: HeldCall) -> None:
        session = self.homes.pop(call)
        session.drop_call(call)
        self._gathering.drop(call)
        self.holds.drop(call)

    def lose(self, calls: Sequence[HeldCall], getters: Sequence[Getter]) -> None:
        """Forget calls and getters that ended with their session."""
        for call in calls:
            del self.homes[call]
            call.forget_text()
            self._gathering.drop(call)
            self.holds.drop(call)
        for getter in getters:
            self.holds.drop(getter)

    def _answer_getters(self, session: Session, effects: Effects, now_s: float) -> None:
        told: list[tuple[Getter, str | PlaitError]] = []
        if effects.variable_set is not None:
            value, made = session.values[effects.variable_set], session.made.get(effects.variable_set)
            for getter in session.take_getters(effects.variable_set):
                told.append((getter, value))
                if made is not None:
                    self._on_job(Job(session.tenant.name, now_s - made.begun_s, getter.mark))
        for variable, cause in effects.variables_failed:
            told += [(getter, variable_failed(variable, cause)) for getter in session.take_getters(variable)]
        session.touch(now_s)
        for getter, _ in told:
            self.holds.drop(getter)
        for getter, answer in told:
            if isinstance(answer, str):
                getter.on_value(answer)
            else:
                getter.on_failed(answer)

    def _promised(self, session: Session, calls: Sequence[HeldCall], now_s: float) -> list[tuple[HeldCall, ReadyCall]]:
        if session in self._entering:
            self._entering[session] += calls
            return []
        if calls:
            session.start_clocks()
        return promised(session, calls, now_s)

    def _tell(self, promises: Iterable[tuple[HeldCall, ReadyCall]], now_s: float) -> None:
        for call, ready in promises:
            if call in self.homes:
                call.tell(ready, now_s)


def _is_unwanted(session: Session, call: HeldCall) -> bool:
    if call.clients or call.absent:
        return False
    return not any(node.consumers or node.name in session.getters for node in session.graph.call(call.call_id).unset)


def _break_off(broken: BrokenCall) -> None:
    call, cause = broken
    call.owner.on_broken(cancelled(call.call_id, cause) if cause.because_of is None else input_failed(cause))


def untaken(session: Session, effects: Effects) -> list[HeldCall]:
    """The calls whose conditions an event decides and which do not hold.

    The event sets the variable of the condition, or adds a call whose variable is set already.
    """
    calls, found = session.calls, list[HeldCall]()
    if effects.variable_set is not None:
        found += [calls[node.call_id] for node in session.graph.variables[effects.variable_set].consumers]
    if effects.added in calls:
        found.append(calls[effects.added])
    return [call for call in found if call.when is not None and _is_untaken(session, call.when)]


def _is_untaken(session: Session, when: Condition) -> bool:
    value = session.values.get(when.variable)
    return value is not None and not when.holds(value)
