"""One session: its graph of calls and variables, its getters, its texts, and its part of the tenant's totals.

`promised` makes the objectives that calls run with of annotations and deductions (docs/design/request-graph.md).
Synchronous; times are arguments, by the gateway's clock or a simulator's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from plait.backends.errors import PlaitError
from plait.gateway.guests.programs.core.held_call import GrowingText, HeldCall, Made, Output, ReadyCall
from plait.gateway.guests.programs.core.record import UNRECORDED, CallEnded, Unrecorded
from plait.gateway.guests.programs.core.session_errors import FailureCause
from plait.policy.programs.needs import Mark, Stage
from plait.policy.programs.objectives import Deductions, slo_of, states_times
from plait.policy.programs.request_graph import RequestGraph, take_apart
from plait.policy.programs.request_graph_state import CallState, Effects, VariableState
from plait.policy.types import Objective, Slo, TaskGroup


@dataclass(slots=True, eq=False)
class Getter:
    """One client's wait for one variable (Parrot's get).

    Either `on_value` or `on_failed` is called once, unless the getter is released first.
    """

    variable: str
    on_value: Callable[[str], None]
    on_failed: Callable[[PlaitError], None]
    mark: Mark | None = None
    """The objective that the client asks for."""
    on_delta: Callable[[GrowingText], None] | None = None
    """Called whenever the text has grown, unless the variable has a transform. A retry brings a new text object."""
    since_s: float | None = None
    """The zero of the JCT: when the job began. None: it has not begun."""

    @property
    def jct_s(self) -> float | None:
        """The JCT that the client asks for, in seconds; None if it asks for none."""
        return self.mark.jct_s if isinstance(self.mark, Slo) else None

    def left_s(self, now_s: float) -> float | None:
        """The seconds left of the JCT: the whole JCT before the job begins; None without a JCT."""
        jct_s = self.jct_s
        return jct_s if jct_s is None or self.since_s is None else jct_s - (now_s - self.since_s)


@dataclass(slots=True, eq=False)
class Tenant:
    """The sessions of one API key, and totals over them."""

    name: str

    sessions: dict[str, Session] = field(default_factory=dict)
    """By id."""

    idle: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    """The sessions that can be evicted, the least recently used first."""

    variables: int = 0
    """Variables in any state."""

    waiting_calls: int = 0
    """Calls that wait for an input."""

    held_bytes: int = 0
    """Bytes of values, growing texts, calls' bodies and filled prompts, and recorded answers."""

    answer_bytes: int = 0
    """Bytes of recorded answers alone."""


class Session:
    """One session. Only its own methods write its fields, except for `closed`, `objective` and `due_s`.

    Each of these three has one writer elsewhere.
    """

    __slots__ = (
        "_answer_bytes",
        "_variables",
        "_waiting_calls",
        "calls",
        "closed",
        "created_s",
        "deductions",
        "due_s",
        "ended",
        "getters",
        "graph",
        "has_room",
        "held_bytes",
        "is_entered",
        "made",
        "not_clocked",
        "objective",
        "outputs",
        "record",
        "session_id",
        "tenant",
        "touched_s",
        "ttl_s",
        "values",
    )  # fmt: skip

    def __init__(self, tenant: Tenant, session_id: str, ttl_s: float, now_s: float) -> None:
        # Identity and lifetime.
        self.tenant = tenant
        self.session_id = session_id
        self.ttl_s = ttl_s
        self.created_s = now_s
        self.touched_s = now_s  # the time to live counts from here
        self.due_s = float("inf")  # when to check next whether the session has expired
        self.closed = False  # takes no more calls and values
        self.ended: PlaitError | None = None  # the error of later uses, once the session has ended
        self.is_entered = False  # a program is being entered
        self.has_room = False  # that program passed the tenant's limits as a whole, so its parts are not checked
        # Calls and deductions.
        self.calls: dict[str, HeldCall] = {}  # calls that have not ended, by id
        self.graph = RequestGraph()
        self.deductions = Deductions(self.graph)
        self.objective: Objective | None = None  # of all that the session produces
        # Variables.
        self.outputs: dict[str, HeldCall | None] = {}  # by variable: its producer; None: the client, or it failed
        self.values: dict[str, str] = {}
        self.made: dict[str, Made] = {}  # by variable that a call has produced
        self.getters: dict[str, list[Getter]] = {}  # by variable
        self.not_clocked: dict[Getter, None] = {}  # getters with a JCT whose job has not begun
        # The log, and this session's part of the tenant's totals.
        self.record: Unrecorded = UNRECORDED
        self.held_bytes = self._answer_bytes = 0
        self._variables = self._waiting_calls = 0

    def __repr__(self) -> str:
        return f"Session({self.session_id!r}, {self.graph!r}, values={len(self.values)})"

    @property
    def expires_s(self) -> float:
        return self.touched_s + self.ttl_s

    @property
    def active(self) -> bool:
        """Whether a call is ready or running, or a client waits. An active session does not expire."""
        counts = self.graph.counts
        if self.getters or counts[CallState.READY] or counts[CallState.RUNNING]:
            return True
        return any(call.has_reader for call in self.calls.values())

    @property
    def is_idle(self) -> bool:
        """Whether the session has no calls and no getters. An idle session may be evicted if its tenant needs room."""
        return not (self.calls or self.getters or self.ended or self.is_entered)

    def add_call(self, call: HeldCall) -> None:
        self.calls[call.call_id] = call
        self.hold(call.held_bytes)

    def drop_call(self, call: HeldCall) -> None:
        del self.calls[call.call_id]
        self.hold(-call.held_bytes - call.forget_text())

    def add_outputs(self, variables: Iterable[str], call: HeldCall) -> None:
        self.outputs |= dict.fromkeys(variables, call)

    def fail_output(self, variable: str) -> None:
        self.outputs[variable] = None

    def set_value(self, variable: str, value: str, size_bytes: int, made: Made | None) -> None:
        """Store a variable's value. `made` is None if a client has set it."""
        self.values[variable] = value
        if made is None:
            self.outputs[variable] = None
        else:
            self.made[variable] = made
        self.hold(size_bytes)

    def end_call(
        self, call: HeldCall, what: FailureCause | str, how: Literal["failed", "cancelled"], now_s: float
    ) -> tuple[Effects, Sequence[str]]:
        """Fail or cancel a call in the graph, deduce anew, and log it. A skipped call is `cancelled`.

        Returns the graph's effects, and the calls whose deductions changed. The caller has to drop the call.
        """
        end = self.graph.fail if how == "failed" else self.graph.cancel
        effects = end(call.call_id, what)
        changed = self.deductions.apply(effects)
        if call.is_recorded:
            self.record.write(CallEnded(call.call_id, what, how), now_s)
        return effects, changed

    def add_getter(self, getter: Getter) -> None:
        self.getters.setdefault(getter.variable, []).append(getter)
        if getter.jct_s is not None:
            self.not_clocked[getter] = None

    def remove_getter(self, getter: Getter) -> None:
        waiting = self.getters[getter.variable]
        waiting.remove(getter)
        if not waiting:
            del self.getters[getter.variable]
        self.not_clocked.pop(getter, None)

    def take_getters(self, variable: str) -> list[Getter]:
        """Remove and return the getters of a variable that was set or has failed."""
        waiting = self.getters.pop(variable, [])
        for getter in waiting:
            self.not_clocked.pop(getter, None)
        return waiting

    def streaming(self, output: Output | None) -> list[Callable[[GrowingText], None]]:
        """The `on_delta` of the getters that stream an output's text. None with a transform: the text is no value."""
        if output is None or output.transform is not None:
            return []
        return [getter.on_delta for getter in self.getters.get(output.variable, ()) if getter.on_delta is not None]

    def show_text(self, call: HeldCall) -> None:
        for on_delta in self.streaming(call.output) if self.getters else ():
            on_delta(call.text)

    def touch(self, now_s: float) -> None:
        """Begin the time to live again, and update the place in the tenant's LRU order of idle sessions."""
        self.touched_s = now_s
        idle = self.tenant.idle
        if self.is_idle:
            idle[self.session_id] = self
            idle.move_to_end(self.session_id)
        else:
            idle.pop(self.session_id, None)

    def record_in(self, record: Unrecorded) -> None:
        self.record = record

    def live_for(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s

    def begin_entry(self, now_s: float) -> None:
        """A program is entered until `end_entry`. Until then the session cannot be evicted."""
        self.is_entered = True
        self.touch(now_s)

    def end_entry(self, now_s: float) -> None:
        """The program has been entered, or was refused."""
        self.is_entered = self.has_room = False
        if not self.ended:
            self.touch(now_s)

    def give_room(self, *, has_room: bool) -> None:
        """With `has_room`, the tenant's limits are not checked: the whole program was checked before."""
        self.has_room = has_room

    def stay(self, now_s: float) -> None:
        """Begin the time to live again, because the session was active at `now_s`."""
        self.touched_s = now_s

    def was_cut(self, variable: str) -> bool:
        """Whether the variable's text was cut at the output limit."""
        return variable in self.made and self.made[variable].was_cut

    def state_of(self, variable: str) -> VariableState:
        node = self.graph.variables.get(variable)
        return VariableState.EMPTY if node is None else node.state

    def variables(self) -> Iterator[str]:
        """The outputs, then the inputs of calls that are nobody's output."""
        yield from self.outputs
        awaited = dict.fromkeys(name for call in self.calls.values() for name in call.inputs)
        yield from (name for name in awaited if name not in self.outputs)

    def unused_id(self, call_id: str) -> str:
        """`call_id`, with a number appended if a call that has not ended has this id."""
        if call_id not in self.calls:
            return call_id
        return next(numbered for n in count(2) if (numbered := f"{call_id}-{n}") not in self.calls)

    def forget_failed(self, outputs: Sequence[str], inputs: Iterable[str] = (), call_id: str = "") -> None:
        """Forget the failures of variables among a new call's `outputs`, so that the call can produce them.

        Does nothing if the graph will refuse the call: another output has a producer, an output is named twice, or a
        failed output is also an input. Raises `GraphError`, and changes nothing, for a cycle.
        """
        known = self.graph.variables
        produced = [node for name in outputs if (node := known.get(name)) is not None and node.producer is not None]
        failed = {node.name for node in produced if node.state is VariableState.FAILED}
        if failed and len(failed) == len(produced) and failed.isdisjoint(inputs):
            self.graph.check_new(call_id, inputs, outputs)
            for name in failed:
                self.graph.forget(name)
                del self.outputs[name]

    def account(self) -> None:
        """Bring the tenant's totals of variables and waiting calls up to date with the graph."""
        tenant, variables, waiting_calls = self.tenant, len(self.graph.variables), self.graph.counts[CallState.WAITING]
        tenant.variables += variables - self._variables
        tenant.waiting_calls += waiting_calls - self._waiting_calls
        self._variables, self._waiting_calls = variables, waiting_calls

    def hold(self, more_bytes: int, *, is_answer: bool = False) -> None:
        """Add `more_bytes`, which may be negative, to the session's and the tenant's bytes."""
        self.held_bytes += more_bytes
        self.tenant.held_bytes += more_bytes
        if is_answer:
            self._answer_bytes += more_bytes
            self.tenant.answer_bytes += more_bytes

    def start_clocks(self) -> None:
        """Set the JCT's zero of each getter whose variable now has a producer.

        The zero is the earliest arrival of the unfinished calls that the variable depends on.
        """
        for getter in tuple(self.not_clocked):
            if self.state_of(getter.variable) is VariableState.PENDING:
                del self.not_clocked[getter]
                upstream = self.deductions.paths.upstream(getter.variable)
                getter.since_s = min(self.calls[call_id].arrived_s for call_id in upstream)

    def end(self, why: PlaitError) -> tuple[list[HeldCall], list[Getter]]:
        """Remove the session from its tenant and free its contents. Returns the calls and getters that it had."""
        self.tenant.variables -= self._variables
        self.tenant.waiting_calls -= self._waiting_calls
        self.tenant.held_bytes -= self.held_bytes
        self.tenant.answer_bytes -= self._answer_bytes
        del self.tenant.sessions[self.session_id]
        self.tenant.idle.pop(self.session_id, None)
        concerned = list(self.calls.values()), [getter for waiting in self.getters.values() for getter in waiting]
        for texts in (self.calls, self.outputs, self.values, self.getters, self.not_clocked):
            texts.clear()
        take_apart(self.graph)
        self.graph = RequestGraph()
        self.deductions = Deductions(self.graph)
        self.ended = why
        return concerned


def repeated(session: Session, call: HeldCall) -> HeldCall | None:
    """The earlier call that `call` repeats: it produces the same variable and has the same fingerprint."""
    output = call.output
    first = None if output is None else session.outputs.get(output.variable)
    return None if first is None or call.fingerprint is None or first.fingerprint != call.fingerprint else first


def is_set(session: Session, variable: str, value: str) -> bool:
    """Whether a client has already set the variable to this value, so that the request is a repetition."""
    producer = session.outputs.get(variable)
    return session.values.get(variable) == value and (producer is None or producer.is_native)


def has_failed(session: Session, variable: str, what: FailureCause) -> bool:
    """Whether the variable has already failed with this very cause, so that the request is a repetition."""
    cause = session.graph.cause(variable)
    return cause is not None and cause.because_of is None and cause.what == what


Group = tuple[TaskGroup, float]
"""A task group, and the longest predicted duration of its calls, each alone on an engine, in seconds."""


def promised(session: Session, calls: Sequence[HeldCall], now_s: float) -> list[tuple[HeldCall, ReadyCall]]:
    """Each ready or running call with its values and objectives.

    A call's share of a JCT counts from now. All other times count from when the call became ready, or its objectives
    changed.
    """
    if not calls:
        return []
    shares = _jct_shares(session, calls, now_s) if session.deductions.paths.timed else {}
    groups: dict[Stage, Group] = {}
    return [(call, _promised(session, call, groups, shares.get(call.call_id))) for call in calls]


def begun(session: Session, changed: Iterable[str]) -> list[HeldCall]:
    """The calls among `changed` whose owners have had `on_ready`."""
    calls = [call for call_id in changed if (call := session.calls.get(call_id)) is not None]
    return [call for call in calls if call.promise is not None]


def timed_by(session: Session, getter: Getter) -> Iterator[str]:
    """The calls whose SLOs a getter's mark sets: the producer, and with a JCT all that the variable depends on."""
    if isinstance(getter.mark, Slo):
        producer = session.outputs.get(getter.variable)
        if producer is not None:
            yield producer.call_id
        if getter.jct_s is not None:
            yield from session.deductions.paths.upstream(getter.variable)


def _promised(session: Session, call: HeldCall, groups: dict[Stage, Group], share_s: float | None) -> ReadyCall:
    deduction = session.deductions.of(call.call_id)
    group, slowest_s = (None, call.in_group_s)
    if deduction.group is not None:
        if deduction.group not in groups:
            groups[deduction.group] = _group(session, deduction.group)
        group, slowest_s = groups[deduction.group]
    asked = session.deductions.asked(call.call_id)
    slo = slo_of(deduction, slowest_s, own=call.slo, asked=asked, share_s=share_s)
    values = {name: session.values[name] for name in call.inputs}
    assert call.ready_s is not None
    if slo is not None:
        slo = slo._replace(is_deduced=not states_times(call.slo, asked))
    return ReadyCall(values, call.ready_s, slo, call.objective or deduction.objective, group)


def _group(session: Session, stage: Stage) -> Group:
    members = [session.calls[call_id] for call_id in session.deductions.members(stage)]
    name = f"{session.tenant.name}/{session.session_id}/{stage.awaited}/{stage.distance}"
    return TaskGroup(name, len(members)), max(call.in_group_s for call in members)


def _jct_shares(session: Session, calls: Iterable[HeldCall], now_s: float) -> dict[str, float]:
    """Each call's share, in seconds, of the JCTs that getters ask for: the shortest of several."""

    def left_s(variable: str) -> float:
        return min(left_s for getter in session.getters[variable] if (left_s := getter.left_s(now_s)) is not None)

    def call_left_s(call_id: str) -> float:
        call = session.calls[call_id]
        elapsed_s = 0.0 if call.ready_s is None else now_s - call.ready_s
        return max(0.0, call.predicted_s - elapsed_s)

    return session.deductions.paths.shares((call.call_id for call in calls), left_s, call_left_s)
