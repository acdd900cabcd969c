"""Deduces the need of each call of a session: a stage (latency), throughput, or none (Parrot, section 5.2).

Clients state objectives in `get` requests for variables (`Marks`) and in annotations of calls (Parrot, 4.1). `Needs`
deduces each call's need from them, and `Stages` has the calls of each stage. A stage of two or more calls is a task
group. A consumer offers its need to its producers, so a change moves upstream: `objectives.py` renews consumers first.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Final, Literal, NamedTuple

from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import Link
from plait.policy.types import Objective, Slo


class Stage(NamedTuple):
    """The calls whose longest path to the call with the id `awaited` has the same length, `distance` calls.

    Native steps, which the client computes without an engine, do not count: the producers of an awaited native step
    have the distance 0, so the step itself has -1.
    """

    awaited: str
    distance: int


LAST_STAGE: Final = Stage("", 0)
"""The calls that no call and no get needs yet, in a session that prefers `latency`."""


class Stages:
    """The stage of each call that has one. `move` puts calls into stages."""

    __slots__ = ("_members", "_stages")

    def __init__(self) -> None:
        self._stages: dict[str, Stage] = {}
        self._members: dict[Stage, dict[str, None]] = {}

    def of(self, call_id: str) -> Stage | None:
        return self._stages.get(call_id)

    def members(self, stage: Stage) -> tuple[str, ...]:
        """The calls of a stage, in the order in which they entered it."""
        return tuple(self._members.get(stage, ()))

    def is_group(self, stage: Stage) -> bool:
        """Whether the stage is a task group: two calls or more."""
        return len(self._members.get(stage, ())) > 1

    def move(self, call_id: str, stage: Stage | None) -> tuple[str, ...]:
        """Put a call into a stage; None takes it out. Returns the other calls that leave or enter a task group: the one
        left alone in the old stage, and the one no longer alone in the new stage.
        """
        before = self._stages.get(call_id)
        if stage == before:
            return ()
        return self._leave(call_id, before) + self._join(call_id, stage)

    def _leave(self, call_id: str, stage: Stage | None) -> tuple[str, ...]:
        if stage is None:
            return ()
        del self._stages[call_id]
        members = self._members[stage]
        del members[call_id]
        if not members:
            del self._members[stage]
        return tuple(members) if len(members) == 1 else ()

    def _join(self, call_id: str, stage: Stage | None) -> tuple[str, ...]:
        if stage is None:
            return ()
        self._stages[call_id] = stage
        members = self._members.setdefault(stage, {})
        first = tuple(members) if len(members) == 1 else ()
        members[call_id] = None
        return first


Mark = Objective | Slo
"""The objective of a `get` request, or its limits of TTFT, TPOT and JCT (Parrot, section 4.1)."""


class Marks:
    """The marks on variables that have no value yet, and the annotations of calls that have not ended.

    `timed` are the variables with a mark for an end-to-end time (JCT). `of_session` is the objective of all calls of
    the session; None: it has none.
    """

    __slots__ = ("_annotations", "_by_variable", "_graph", "of_session", "timed")

    def __init__(self, graph: RequestGraph) -> None:
        self._graph = graph
        self._by_variable: dict[str, list[Mark]] = {}
        self._annotations: dict[str, Objective] = {}
        self.timed: set[str] = set()
        self.of_session: Objective | None = None

    def __bool__(self) -> bool:
        return bool(self._by_variable or self._annotations or self.of_session)

    def __contains__(self, variable: object) -> bool:
        return variable in self._by_variable

    def add(self, variable: str, mark: Mark) -> None:
        self._by_variable.setdefault(variable, []).append(mark)
        if _jct_s(mark) is not None:
            self.timed.add(variable)

    def remove(self, variable: str, mark: Mark) -> bool:
        """A client no longer waits for a variable. Returns whether it was waiting."""
        marks = self._by_variable.get(variable, [])
        if mark not in marks:
            return False
        marks.remove(mark)
        if not any(_jct_s(other) is not None for other in marks):
            self.timed.discard(variable)
        if not marks:
            del self._by_variable[variable]
        return True

    def answer(self, variable: str) -> None:
        """A variable is set or has failed, so its gets are answered: drop its marks."""
        self._by_variable.pop(variable, None)
        self.timed.discard(variable)

    def annotate(self, call_id: str, objective: Objective | None) -> None:
        """A call states its own objective; None takes it back."""
        if objective is None:
            self._annotations.pop(call_id, None)
        else:
            self._annotations[call_id] = objective

    def annotation(self, call_id: str) -> Objective | None:
        return self._annotations.get(call_id)

    def on(self, call_id: str) -> list[Mark]:
        if not self._by_variable:
            return []
        unset = self._graph.call(call_id).unset
        return [mark for variable in unset for mark in self._by_variable.get(variable.name, ())]

    def asked(self, call_id: str) -> Slo | None:
        """The SLO that the marks on a call's outputs state: the tightest of each limit; None if none states one."""
        slos = [mark for mark in self.on(call_id) if isinstance(mark, Slo)]
        if not slos:
            return None
        return Slo(
            ttft_s=_tightest(slo.ttft_s for slo in slos),
            tpot_s=_tightest(slo.tpot_s for slo in slos),
            jct_s=_tightest(slo.jct_s for slo in slos),
        )


def _jct_s(mark: Mark) -> float | None:
    return mark.jct_s if isinstance(mark, Slo) else None


def _tightest(seconds: Iterable[float | None]) -> float | None:
    return min((given for given in seconds if given is not None), default=None)


Need = Stage | Literal[Objective.THROUGHPUT]
"""The stage in which a call has to be fast, or throughput. No need is None."""


class Offers:
    """The needs of one call's consumers, counted once for each link.

    A change takes O(1). `need` takes logarithmic time in the awaited calls, and linear time in the distances of one
    awaited call.
    """

    __slots__ = ("_changed", "_heap", "_links", "_throughput_links")

    def __init__(self) -> None:
        self._links: dict[str, dict[int, int]] = {}  # by awaited call and distance
        self._throughput_links = 0
        self._changed: list[str] = []
        self._heap: list[tuple[int, str]] = []  # (largest distance, awaited call); entries may be stale

    def __bool__(self) -> bool:
        return bool(self._links or self._throughput_links)

    def change(self, need: Need, links: int) -> None:
        """Add `links` links to consumers with this need; a negative number removes them."""
        if not isinstance(need, Stage):
            self._throughput_links += links
            return
        awaited, distance = need
        distances = self._links.get(awaited)
        if distances is None:
            distances = self._links[awaited] = {}
        count = distances.get(distance, 0) + links
        if count:
            distances[distance] = count
        else:
            del distances[distance]
            if not distances:
                del self._links[awaited]
        self._changed.append(awaited)

    def need(self) -> Need | None:
        """The call's need: a stage, otherwise throughput; None without offers.

        Each awaited call counts with the largest distance that consumers offer for it (the longest path). The awaited
        call with the smallest of these is taken, and this call is one farther.
        """
        for awaited in self._links.keys() & self._changed:
            heappush(self._heap, (max(self._links[awaited]), awaited))
        self._changed.clear()
        if len(self._heap) > 2 * len(self._links) + 8:
            self._heap = [(max(distances), awaited) for awaited, distances in self._links.items()]
            heapify(self._heap)
        while self._heap:
            distance, awaited = self._heap[0]
            if distance == max(self._links.get(awaited, ()), default=None):
                return Stage(awaited, distance + 1)
            heappop(self._heap)
        return Objective.THROUGHPUT if self._throughput_links else None


class Needs:
    """The needs of calls, and the needs that their consumers offer. Renew consumers before producers."""

    __slots__ = ("_graph", "_marks", "_needs", "_offers")

    def __init__(self, graph: RequestGraph, marks: Marks) -> None:
        self._graph = graph
        self._marks = marks
        self._needs: dict[str, Need] = {}
        self._offers: dict[str, Offers] = {}

    def __bool__(self) -> bool:
        return bool(self._needs)

    def reach(self, call_id: str) -> bool:
        """Whether the call has a need. False for a native step, which has no objective."""
        return call_id in self._needs and not self._graph.calls[call_id].is_native

    def stage(self, call_id: str) -> Stage | None:
        """A call's stage; None if it needs no stage, if it is a native step, or if it is annotated `throughput`."""
        need = self._needs.get(call_id)
        if not isinstance(need, Stage) or self._graph.calls[call_id].is_native:
            return None
        return None if self._marks.annotation(call_id) is Objective.THROUGHPUT else need

    def link(self, link: Link, count: int) -> None:
        """A consumer's link to a producer was added (`count` 1) or removed (-1)."""
        need = self._needs.get(link.consumer)
        if need is not None:
            self._offer(link.producer, need, count)

    def renew(self, call_id: str) -> bool:
        """Update a call's need and its offers to its producers. Returns whether the need has changed."""
        before, need = self._needs.get(call_id), self._need_of(call_id)
        if need == before:
            return False
        if need is None:
            del self._needs[call_id]
        else:
            self._needs[call_id] = need
        for producer in self._graph.calls[call_id].producers():
            if before is not None:
                self._offer(producer, before, -1)
            if need is not None:
                self._offer(producer, need, 1)
        return True

    def drop(self, call_id: str) -> None:
        self._needs.pop(call_id, None)
        self._offers.pop(call_id, None)

    def _offer(self, call_id: str, need: Need, links: int) -> None:
        offers = self._offers.get(call_id)
        if offers is None:
            offers = self._offers[call_id] = Offers()
        offers.change(need, links)
        if not offers:
            del self._offers[call_id]

    def _need_of(self, call_id: str) -> Need | None:
        """A call's need. A native step's is one call nearer, so that its producers' distances do not count it."""
        need = self._need_as_call(call_id)
        if isinstance(need, Stage) and self._graph.calls[call_id].is_native:
            return need._replace(distance=need.distance - 1)
        return need

    def _need_as_call(self, call_id: str) -> Need | None:
        own, marks = self._marks.annotation(call_id), self._marks.on(call_id)
        if own is Objective.LATENCY or marks.count(Objective.THROUGHPUT) < len(marks):
            return Stage(call_id, 0)
        offers = self._offers.get(call_id)
        need = None if offers is None else offers.need()
        if need is not None:
            return need
        if own or marks or self._marks.of_session is Objective.THROUGHPUT:
            return Objective.THROUGHPUT
        return None if self._marks.of_session is None else LAST_STAGE
