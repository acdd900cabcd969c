"""A session's calls and semantic variables: the calls that may run now, and failures that spread (Parrot, 4.2 and 5.1).

The graph knows states, not texts. Calls come in any order. They may name variables that no call produces yet. Each
event is a method that either raises `GraphError` and changes nothing, or returns its `Effects`. A call leaves the graph
when it ends. Its outputs keep their states until they are forgotten. So the graph holds only calls that have not ended
and variables that a client may still ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from plait.policy.programs.request_graph_state import (
    NO_EFFECTS,
    CallEvent,
    CallNode,
    CallState,
    Cause,
    CycleError,
    DoubleProducerError,
    Edge,
    Effects,
    Ended,
    Failed,
    GraphError,
    GraphTransitionError,
    InputFailed,
    Link,
    VariableEvent,
    VariableNode,
    VariableState,
    duplicate_call,
    ranks_with,
    unknown_call,
)

CLIENT: Final = "the client"
"""The producer of a variable whose value came from the client."""


class RequestGraph:
    """The graph of one session: events change it, questions read it.

    `calls` are the nodes of the calls that have not ended, `variables` those of the variables that have not been
    forgotten, and `counts` the number of calls in each state. Other modules may read all of them.

    An event takes time in proportion to its changes. Adding a call takes time in proportion to its inputs and outputs.
    If the call has both producers and consumers in the graph, calls in the wrong order are visited too (see
    `ranks_with`).
    """

    __slots__ = ("calls", "counts", "variables")

    def __init__(self) -> None:
        self.calls: dict[str, CallNode] = {}
        self.variables: dict[str, VariableNode] = {}
        self.counts = dict.fromkeys((CallState.WAITING, CallState.READY, CallState.RUNNING), 0)

    def __repr__(self) -> str:
        counts = ", ".join(f"{state}={count}" for state, count in self.counts.items() if count)
        return f"RequestGraph(variables={len(self.variables)}, {counts})"

    # Events.

    def add(
        self,
        call_id: str,
        inputs: Iterable[str],
        outputs: Sequence[str],
        *,
        is_native: bool = False,
        predicted_s: float = 0.0,
    ) -> Effects:
        """A call arrives. It takes `inputs` and will produce `outputs` in this order.

        If all inputs have values, the call is ready at once. If an input has failed, the call fails at once. A native
        step is a call, too: the client computes its output. Raises `GraphError` for an id that is taken,
        `DoubleProducerError` or `CycleError`.
        """
        node, taken = CallNode(call_id, is_native=is_native, predicted_s=predicted_s), dict.fromkeys(inputs)
        ranks = _ranks_with(self, node, taken, outputs)
        for name in taken:
            cause = self.cause(name)
            if cause is not None:
                return self._add_failed(node, outputs, Cause(InputFailed(name), call_id, cause))
        for moved, rank in ranks.items():
            moved.rank = rank
        linked = self._link(node, taken, outputs)
        if node.missing:
            return Effects(added=call_id, linked=linked)
        self._enter(node, CallEvent.UNBLOCK)
        return Effects(added=call_id, ready=(call_id,), linked=linked)

    def refuse(self, refused_id: str, outputs: Sequence[str], what: object) -> Effects:
        """The request that would have produced `outputs` was refused because of `what`, before it became a call.

        The outputs and the calls that wait for them fail. Raises as `add` does.
        """
        node = CallNode(refused_id)
        _ranks_with(self, node, (), outputs)
        return self._add_failed(node, outputs, Cause(what, refused_id))

    def set_value(self, variable: str) -> Effects:
        """The client gives a variable its value (Parrot, section 7). Raises `DoubleProducerError`."""
        first = self.producer(variable)
        if first is not None:
            raise DoubleProducerError(variable, first, CLIENT)
        node = self._variable(variable)
        node.producer = CLIENT
        return self._set(node)

    def start(self, call_id: str) -> Effects:
        self._enter(self.call(call_id), CallEvent.START)
        return NO_EFFECTS

    def produce(self, call_id: str, variable: str) -> Effects:
        """A running call's next output has its value. With its last one the call finishes."""
        node = self.call(call_id)
        due = node.due
        if due is None or due.name != variable:
            next_one = due and due.name
            raise GraphTransitionError(f"call {call_id!r} cannot produce {variable!r} now: next is {next_one!r}")
        is_last = due is node.outputs[-1]
        if is_last:
            self._end(node, CallEvent.FINISH)
        else:
            self._enter(node, CallEvent.PRODUCE)
        node.produced += 1
        return self._set(due, (Ended(call_id, node.state, None),) if is_last else ())

    def finish(self, call_id: str) -> Effects:
        """A running call without outputs has its answer."""
        node = self.call(call_id)
        if node.due is not None:
            raise GraphTransitionError(f"call {call_id!r} cannot finish before it produces {node.due.name!r}")
        self._end(node, CallEvent.FINISH)
        return Effects(ended=(Ended(call_id, node.state, None),))

    def fail(self, call_id: str, what: object) -> Effects:
        """A call has ended before it produced all its outputs. They fail, and so do the calls that wait for them.

        `what` says why: a text, or a value with a `str`. The `Cause` of this call is the root of all later causes.
        """
        return self._break_off(call_id, CallEvent.FAIL, what)

    def cancel(self, call_id: str, what: object = "it was cancelled") -> Effects:
        """A call is no longer wanted. Its outputs and the calls that wait for them fail, as in `fail`."""
        return self._break_off(call_id, CallEvent.CANCEL, what)

    def forget(self, variable: str) -> None:
        """Drop a variable that is no longer needed. A new variable may then have its name.

        Raises `GraphError` for an unknown variable, and while a call that has not ended names it.
        """
        users = self.users(variable)
        if users:
            names = ", ".join(map(repr, users[:3]))
            raise GraphError(f"variable {variable!r} cannot be forgotten before the calls that name it end: {names}")
        del self.variables[variable]

    # Questions.

    def __contains__(self, call_id: str) -> bool:
        """Whether the call was added and has not ended."""
        return call_id in self.calls

    def call(self, call_id: str) -> CallNode:
        """The node of a call. Raises `GraphError` for a call that was never added or has ended."""
        node = self.calls.get(call_id)
        if node is None:
            raise unknown_call(call_id)
        return node

    def call_state(self, call_id: str) -> CallState | None:
        """Waiting, ready or running; None for a call that was never added or has ended."""
        node = self.calls.get(call_id)
        return None if node is None else node.state

    def variable_state(self, variable: str) -> VariableState | None:
        """A variable's state; None if no call has named it, or if it was forgotten."""
        node = self.variables.get(variable)
        return None if node is None else node.state

    def cause(self, variable: str) -> Cause | None:
        node = self.variables.get(variable)
        return None if node is None else node.cause

    def producer(self, variable: str) -> str | None:
        """The producer of a variable (Parrot's GetProducer): a call, or `CLIENT`; None without one.

        A pending variable's producer is in the graph. The producer of a set or failed variable may have ended.
        """
        node = self.variables.get(variable)
        return None if node is None else node.producer

    def check_new(self, call_id: str, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Raise what `add` would raise if the failed variables among `outputs` were forgotten."""
        new = [name for name in outputs if self.variable_state(name) is not VariableState.FAILED]
        _ranks_with(self, CallNode(call_id), dict.fromkeys(inputs), new)

    def users(self, variable: str) -> tuple[str, ...]:
        """The calls that have not ended and have the variable as input or output. Raises `GraphError` without it."""
        node = self.variables.get(variable)
        if node is None:
            raise GraphError(f"no variable {variable!r} is in the graph: no call has named it, or it was forgotten")
        users = tuple([consumer.call_id for consumer in node.consumers])
        producer = None if node.producer is None else self.calls.get(node.producer)
        if producer is not None and node in producer.outputs:  # a later call may have the id of one that ended
            return (producer.call_id, *users)
        return users

    def consumers(self, call_id: str) -> list[str]:
        """The calls that wait for a call's unset outputs, once for each such variable (Parrot's GetConsumers)."""
        return [consumer.call_id for _, consumer in self.call(call_id).edges()]

    # Changes, once they are checked.

    def _variable(self, name: str) -> VariableNode:
        """The node of a variable; makes it if the name is new."""
        node = self.variables.get(name)
        if node is None:
            node = self.variables[name] = VariableNode(name)
        return node

    def _link(self, node: CallNode, inputs: Iterable[str], outputs: Iterable[str]) -> tuple[Link, ...]:
        """Add a call, which waits for its inputs that have no value yet. Returns its links."""
        taken, links = list[VariableNode](), list[Link]()
        for name in inputs:
            variable = self._variable(name)
            taken.append(variable)
            variable.consumers[node] = None
            node.missing += variable.state is not VariableState.SET
            if variable.state is VariableState.PENDING and variable.producer is not None:
                links.append(Link(variable.producer, node.call_id))
        node.inputs = tuple(taken)
        self._promise(node, outputs)
        self.calls[node.call_id] = node
        self.counts[node.state] += 1
        for variable in node.outputs:
            for consumer in variable.consumers:
                links.append(Link(node.call_id, consumer.call_id))
        return tuple(links)

    def _promise(self, node: CallNode, outputs: Iterable[str]) -> None:
        """Make a call the producer of these `outputs`. The call itself need not be added."""
        promised = list[VariableNode]()
        for name in outputs:
            variable = self._variable(name)
            variable.enter(VariableEvent.PROMISE)
            variable.producer = node.call_id
            promised.append(variable)
        node.outputs = tuple(promised)

    def _enter(self, node: CallNode, event: CallEvent) -> None:
        """A call goes to the state after `event` and stays in the graph. Raises `GraphTransitionError`."""
        before = node.state
        node.enter(event)
        self.counts[before] -= 1
        self.counts[node.state] += 1

    def _end(self, node: CallNode, event: CallEvent) -> list[Link]:
        """A call leaves the graph with `event`. Returns its links to the producers that it was waiting for."""
        before = node.state
        node.enter(event)
        self.counts[before] -= 1
        del self.calls[node.call_id]
        cut = list[Link]()
        for variable in node.inputs:
            del variable.consumers[node]
            if variable.state is VariableState.PENDING and variable.producer is not None:
                cut.append(Link(variable.producer, node.call_id))
            if variable.state is VariableState.EMPTY and not variable.consumers:
                del self.variables[variable.name]  # no call names it any more
        return cut

    def _add_failed(self, node: CallNode, outputs: Iterable[str], cause: Cause) -> Effects:
        """Fail a new call, and the calls that wait for it. The call is never linked."""
        self._promise(node, outputs)
        node.enter(CallEvent.FAIL)
        return self._collapse(node, cause, (), added=node.call_id)

    def _set(self, variable: VariableNode, ended: tuple[Ended, ...] = ()) -> Effects:
        cut, ready = [], []
        for call in variable.consumers:
            if variable.state is VariableState.PENDING and variable.producer is not None:
                cut.append(Link(variable.producer, call.call_id))
            call.missing -= 1
            if not call.missing:
                self._enter(call, CallEvent.UNBLOCK)
                ready.append(call.call_id)
        variable.enter(VariableEvent.SET)
        return Effects(ready=tuple(ready), variable_set=variable.name, ended=ended, cut=tuple(cut))

    def _break_off(self, call_id: str, event: CallEvent, what: object) -> Effects:
        node = self.call(call_id)
        return self._collapse(node, Cause(what, call_id), self._end(node, event))

    def _collapse(self, node: CallNode, cause: Cause, cut: Iterable[Link], added: str | None = None) -> Effects:
        """`node` has ended without its unset outputs. Fail them and all calls that wait for them, breadth first."""
        cut, ended, failed = list(cut), list[Ended](), list[Failed]()
        todo: deque[CallNode] = deque()

        def fall(call: CallNode, cause: Cause) -> None:
            ended.append(Ended(call.call_id, call.state, cause))
            failed.extend(Failed(variable.name, cause) for variable in call.unset)
            for variable in call.unset:
                variable.enter(VariableEvent.FAIL)
                variable.cause = cause
            todo.append(call)

        fall(node, cause)
        while todo:
            for variable in todo.popleft().unset:
                for call in tuple(variable.consumers):
                    cut += self._end(call, CallEvent.FAIL)
                    fall(call, Cause(InputFailed(variable.name), call.call_id, variable.cause))
        return Effects(added=added, variables_failed=tuple(failed), ended=tuple(ended), cut=tuple(cut))


def take_apart(graph: RequestGraph) -> None:
    """Break the reference cycles of a graph that is no longer used, so that its nodes are freed at once.

    Otherwise they would stay until the garbage collector runs, which is rare in a gateway.
    """
    for variable in graph.variables.values():
        variable.consumers.clear()


def _ranks_with(
    graph: RequestGraph, node: CallNode, inputs: Collection[str], outputs: Sequence[str]
) -> dict[CallNode, int]:
    """Check a new call and return the ranks to set. Raises every error that `add` can raise. Changes nothing."""
    calls, variables = graph.calls, graph.variables
    if node.call_id in calls:
        raise duplicate_call(node.call_id)
    seen: set[str] = set()
    consumers: list[Edge] = []
    for name in outputs:
        awaited = variables.get(name)
        if name in seen:
            raise DoubleProducerError(name, node.call_id, node.call_id)
        if awaited is not None and awaited.producer is not None:
            raise DoubleProducerError(name, awaited.producer, node.call_id)
        if name in inputs:
            raise CycleError((node.call_id, name, node.call_id))
        seen.add(name)
        if awaited is not None:
            consumers += [(awaited, call) for call in awaited.consumers]
    producers: dict[CallNode, VariableNode] = {}
    for name in inputs:
        variable = variables.get(name)
        if variable is not None and variable.state is VariableState.PENDING and variable.producer is not None:
            producers[calls[variable.producer]] = variable
    return ranks_with(node, producers, consumers)
