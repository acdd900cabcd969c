"""What the events of a session came to: which of its calls have ended by themselves, and which events still matter.

An event matters if the session would be another without it. What does not matter any more is a call that has failed and
whose outputs others have produced since, such as all but the last of a request that fails in a loop. It still matters
to calls that ended because it failed, as long as these matter. Nor do starts of a call matter once it has produced the
output that it was started for, nor any but the last objective and the last time to live.

Not every log says which calls were skipped. So a replay skips a call by the condition in its request again, in every
log, and the request of a call that was skipped, or failed with an input, is always needed. A log that contradicts
itself without its skips is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plait.gateway.programs.record import (
    CallEnded,
    Kept,
    Preferred,
    SessionEvent,
    Started,
    Submitted,
    ValueSet,
    VariableFailed,
)
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import CallState, GraphError, VariableState


def ended_calls(events: Sequence[SessionEvent]) -> dict[int, list[int]]:
    """The calls that have ended by themselves: the place of each `Submitted`, and those of its values and its end.

    A call that was skipped is not among them.
    """
    ended, submitted, left = dict[int, list[int]](), dict[str, int](), dict[str, int]()
    later = dict[str, list[int]]()
    for place, event in enumerate(events):
        match event:
            case Submitted():
                submitted[event.call_id], left[event.call_id], later[event.call_id] = place, len(event.outputs), []
            case ValueSet(call_id=str(call_id)) if call_id in submitted:
                later[call_id].append(place)
                left[call_id] -= 1
                if not left[call_id]:
                    ended[submitted.pop(call_id)] = later[call_id]
            case CallEnded() if event.call_id in submitted and not event.is_skip:
                ended[submitted.pop(event.call_id)] = [*later[event.call_id], place]
            case _:
                pass
    return ended


@dataclass(slots=True, eq=False)
class Source:
    """Where values of variables come from, or would have: a call, a client's value, or a client's failure."""

    event: int
    """The place of the event that it began with."""

    inputs: tuple[str, ...]

    outputs: set[str]
    """The outputs that have not been produced anew since they failed."""

    is_over: bool = False

    starts: list[int] = field(default_factory=list)
    """The places of its starts for its current output."""

    events: list[int] = field(default_factory=list)
    """The places of its values, and of its end."""

    taken_from: list[Source] = field(default_factory=list)
    """The sources of its inputs when it ended."""

    @property
    def places(self) -> list[int]:
        """The places of all its events that matter if it does."""
        return [self.event, *self.events, *(() if self.is_over else self.starts)]


class Outline:
    """The calls and variables of a session, from the `events` of it so far."""

    def __init__(self, events: Sequence[SessionEvent]) -> None:
        self._graph = RequestGraph()
        self._sources: list[Source] = []
        self._calls: dict[str, Source] = {}  # of the calls that have not ended
        self._producers: dict[str, Source] = {}  # by output
        self._last: dict[object, int] = {}  # the last event of a kind, of which the others do not matter
        self._count = len(events)
        self._all: range | None = None  # all places, if an event cannot follow from those before it
        try:
            for place, event in enumerate(events):
                self._apply(place, event)
        except GraphError:  # a skip was not written: what came after is not what the graph says
            self._all = range(len(events))

    @property
    def mattering(self) -> Sequence[int]:
        if self._all is not None:
            return self._all
        todo = [source for source in self._sources if source.outputs or not source.is_over]
        todo += [before for call in self._calls.values() for before in self._taken(call)]
        found = dict.fromkeys(todo)
        while todo:
            new = [source for source in todo.pop().taken_from if source not in found]
            found |= dict.fromkeys(new)
            todo += new
        latest = range(self._count)[-1:]  # whose time the session's time to live counts from
        return sorted({*latest, *self._last.values(), *(place for source in found for place in source.places)})

    def _apply(self, place: int, event: SessionEvent) -> None:
        match event:
            case Submitted():
                self._submit(place, event)
            case Started() if event.call_id in self._calls:
                self._calls[event.call_id].starts.append(place)
            case ValueSet(call_id=None):
                self._forget([event.variable])
                self._graph.set_value(event.variable)
                self._add(place, (), [event.variable]).is_over = True
            case ValueSet(call_id=str(call_id)) if call_id in self._calls:
                self._produce(place, call_id, event.variable)
            case VariableFailed():
                self._forget([event.variable])
                failed = self._graph.refuse(event.where, [event.variable], event.what)
                self._add(place, (), [event.variable]).is_over = True
                self._end(ended.call_id for ended in failed.ended[1:])
            case CallEnded() if event.call_id in self._calls:
                self._calls[event.call_id].events.append(place)
                self._end(ended.call_id for ended in self._graph.fail(event.call_id, event.what).ended)
            case Started() | ValueSet() | CallEnded():
                pass  # of a call that has ended
            case Kept() | Preferred():
                self._last[type(event)] = place
            case _:
                self._last[place] = place

    def _submit(self, place: int, event: Submitted) -> None:
        self._forget(event.outputs)
        effects = self._graph.add(event.call_id, event.inputs, event.outputs)
        self._calls[event.call_id] = self._add(place, event.inputs, event.outputs)
        self._end(ended.call_id for ended in effects.ended)

    def _produce(self, place: int, call_id: str, variable: str) -> None:
        if self._graph.call_state(call_id) is CallState.READY:
            self._graph.start(call_id)
        call = self._calls[call_id]
        effects = self._graph.produce(call_id, variable)
        call.events.append(place)
        call.starts.clear()
        self._end(ended.call_id for ended in effects.ended)

    def _add(self, place: int, inputs: tuple[str, ...], outputs: Iterable[str]) -> Source:
        source = Source(place, inputs, set(outputs))
        self._sources.append(source)
        self._producers |= dict.fromkeys(source.outputs, source)
        return source

    def _end(self, call_ids: Iterable[str]) -> None:
        for call_id in call_ids:
            call = self._calls.pop(call_id)
            call.is_over = True
            call.taken_from = self._taken(call)

    def _taken(self, call: Source) -> list[Source]:
        """The sources of a call's inputs now."""
        return [self._producers[name] for name in call.inputs if name in self._producers]

    def _forget(self, outputs: Iterable[str]) -> None:
        """Note that those outputs which have failed are produced anew."""
        for name in outputs:
            if self._graph.variable_state(name) is VariableState.FAILED:
                self._graph.forget(name)
                self._producers.pop(name).outputs.discard(name)
