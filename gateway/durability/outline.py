"""Decides, from the log alone, which events of a session still matter, and which calls have ended.

An event matters if a replay without it would make another session. These events do not matter:

- those of a failed call all of whose outputs were produced anew since, such as the earlier tries of a request that
  failed in a loop, unless a call that matters failed because of it;
- the attempts for an output that has its value;
- all objectives and times to live but the last.

Logs of earlier releases do not say which calls were skipped. So a replay decides skips anew, by the conditions in the
requests, and the request of a call that was skipped or failed with an input always matters. A log that contradicts
itself without its skips is not compacted.
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
    """The calls that produced all outputs, failed or were cancelled, but not those skipped or failed with an input.

    Maps the place of each `Submitted` in `events` to the places of the call's values and its end.
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
    """A producer of variables: a call, a client that set a value, or a client that failed a variable."""

    event: int
    """The place of its first event."""

    inputs: tuple[str, ...]

    outputs: set[str]
    """The outputs that have no newer source."""

    is_over: bool = False

    starts: list[int] = field(default_factory=list)
    """The places of the attempts for the current output."""

    events: list[int] = field(default_factory=list)
    """The places of the values and the end."""

    taken_from: list[Source] = field(default_factory=list)
    """The sources of the inputs at the time of the end."""

    @property
    def places(self) -> list[int]:
        """The places of all events that matter if this source does."""
        return [self.event, *self.events, *(() if self.is_over else self.starts)]


class Outline:
    """The calls and variables of a session after its `events`."""

    def __init__(self, events: Sequence[SessionEvent]) -> None:
        self._graph = RequestGraph()
        self._sources: list[Source] = []
        self._calls: dict[str, Source] = {}  # by id: calls that have not ended
        self._producers: dict[str, Source] = {}  # by output
        self._last: dict[object, int] = {}  # by kind: the last event, if only the last one matters
        self._count = len(events)
        self._all: range | None = None  # all places, if the log contradicts itself
        try:
            for place, event in enumerate(events):
                self._apply(place, event)
        except GraphError:  # an earlier release did not log a skip, so this graph is in another state
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
        latest = range(self._count)[-1:]  # the session's time to live counts from the time of the last event
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
                pass  # the call has ended
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
        """The present sources of a call's inputs."""
        return [self._producers[name] for name in call.inputs if name in self._producers]

    def _forget(self, outputs: Iterable[str]) -> None:
        """Give the failed ones among `outputs` up for a new source."""
        for name in outputs:
            if self._graph.variable_state(name) is VariableState.FAILED:
                self._graph.forget(name)
                self._producers.pop(name).outputs.discard(name)
