"""The need of each call of a session: a stage, throughput, or none (Parrot, 5.2)."""

from __future__ import annotations

from plait.policy.programs.objectives_marks import Marks
from plait.policy.programs.objectives_offers import Need, Offers
from plait.policy.programs.objectives_stage import LAST_STAGE, Stage
from plait.policy.programs.request_graph_effects import Link
from plait.policy.programs.request_graph_view import RequestGraphView
from plait.policy.types import Objective


class Needs:
    """The needs of calls, and the needs that their consumers offer. Consumers are renewed before producers."""

    __slots__ = ("_graph", "_marks", "_needs", "_offers")

    def __init__(self, graph: RequestGraphView, marks: Marks) -> None:
        self._graph = graph
        self._marks = marks
        self._needs: dict[str, Need] = {}
        self._offers: dict[str, Offers] = {}

    def reach(self, call_id: str) -> bool:
        """Whether a get or an annotation reaches the call. A native step has no objective, so nothing reaches it."""
        return call_id in self._needs and not self._graph.is_native(call_id)

    def stage(self, call_id: str) -> Stage | None:
        """A call's stage; None if it needs no stage, if it is a native step, or if it is annotated `throughput`."""
        need = self._needs.get(call_id)
        if not isinstance(need, Stage) or self._graph.is_native(call_id):
            return None
        return None if self._marks.annotation(call_id) is Objective.THROUGHPUT else need

    def link(self, link: Link, count: int) -> None:
        """A link has come (1) or gone (-1)."""
        need = self._needs.get(link.consumer)
        if need is not None:
            self._offer(link.producer, need, count)

    def renew(self, call_id: str) -> bool:
        """Bring up to date a call's need, and its offers to its producers. Returns whether the need has changed."""
        before, need = self._needs.get(call_id), self._need_of(call_id)
        if need == before:
            return False
        if need is None:
            del self._needs[call_id]
        else:
            self._needs[call_id] = need
        for producer in self._graph.producers(call_id):
            if before is not None:
                self._offer(producer, before, -1)
            if need is not None:
                self._offer(producer, need, 1)
        return True

    def drop(self, call_id: str) -> None:
        """Forget a call that has ended."""
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
        """A call's need. That of a native step is one call nearer: its producers are as far as if it were not there."""
        need = self._need_as_call(call_id)
        if isinstance(need, Stage) and self._graph.is_native(call_id):
            return need._replace(distance=need.distance - 1)
        return need

    def _need_as_call(self, call_id: str) -> Need | None:
        own, marks = self._marks.annotation(call_id), tuple(self._marks.on(call_id))
        if own is Objective.LATENCY or any(mark is not Objective.THROUGHPUT for mark in marks):
            return Stage(call_id, 0)
        offers = self._offers.get(call_id)
        need = None if offers is None else offers.need()
        if need is not None:
            return need
        if own or marks or self._marks.of_session is Objective.THROUGHPUT:
            return Objective.THROUGHPUT
        return None if self._marks.of_session is None else LAST_STAGE

    def check(self) -> None:
        """Assert the invariants; for tests."""
        for call_id in (*self._needs, *self._offers):
            assert self._needs.get(call_id) == self._need_of(call_id)
        for call_id, offers in self._offers.items():
            needs = [self._needs.get(consumer) for consumer in self._graph.consumers(call_id)]
            assert offers.counted() == {need: needs.count(need) for need in needs if need is not None}
