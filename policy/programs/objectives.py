"""What each call of a session should be optimised for, deduced from what the application waits for (Parrot, 5.2).

A client says so in two ways: it *gets* a variable with an objective, or annotates a call with one. Both make a call an
awaited one: the variable's producer, or the call itself. Walking from awaited calls against the edges of the graph:

- `throughput` marks every call upstream throughput-preferred;
- `latency` gives every call upstream a stage: 0 is the awaited call, and a consumer in stage k puts its producers into
  stage k + 1, so a call's stage is its longest distance to the awaited call. A stage of one call is a latency call, all
  the way up the chain. Two or more are a task group: what counts is when the last of them has completed.

Where the wishes differ:

- A call's own annotation wins over anything deduced for it. A call annotated `throughput` is in no task group, but
  hands on upstream the stage that it would have had.
- Latency wins over throughput for a call that serves both.
- A call whose consumers are in stages of several awaited calls takes the smallest of the stages that they offer; of
  equal ones, that of the awaited call with the smaller id. (A consumer offers only the stage that it takes itself, so a
  call remembers one stage, however many variables are awaited.) An awaited call is in its own stage 0 in any case.
- A get with an explicit `Slo` deduces as `latency`; its figures are given by `asked`.

The deduction is a function of the graph's calls and links and of the marks, never of the order in which they came. A
call that has ended is not in the graph: when only one call of a group is left it is a latency call, as it alone holds
up what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from plait.policy.programs.objectives_offers import Need, Offers
from plait.policy.programs.objectives_stage import Stage, Stages
from plait.policy.programs.request_graph_effects import Effects
from plait.policy.programs.request_graph_state import UnknownCallError, VariableState
from plait.policy.programs.request_graph_view import RequestGraphView
from plait.policy.types import Objective, Slo

Mark = Objective | Slo
"""What a `get` asks for: an objective, or figures (Parrot, section 4.1)."""


@dataclass(frozen=True, slots=True)
class Deduction:
    """What a call is optimised for (Parrot, 5.2): `objective` is None if nobody has said anything that reaches it.

    `stage` is how many calls follow it on the longest way to the awaited one, None unless it is a latency call. `group`
    is the task group that it is part of, the same value for all of its calls for as long as there is one.
    """

    objective: Objective | None = None
    stage: int | None = None
    group: Stage | None = None


NOTHING = Deduction()
"""Nobody has said anything."""
_THROUGHPUT = Deduction(Objective.THROUGHPUT)


class Deductions:
    """The deductions of one session's graph, kept as it changes: `apply` is told the effects of every event.

    Every event returns the calls whose deduction has changed by it. It costs the calls whose need changes and their
    links; sessions in which nobody marks anything cost nothing.
    """

    __slots__ = ("_deduced", "_graph", "_marks", "_needs", "_offers", "_own", "_stages")

    def __init__(self, graph: RequestGraphView) -> None:
        self._graph = graph
        self._marks: dict[str, list[Mark]] = {}  # by variables that have no value yet
        self._own: dict[str, Objective] = {}
        self._needs: dict[str, Need] = {}
        self._offers: dict[str, Offers] = {}
        self._stages = Stages()
        self._deduced: dict[str, Deduction] = {}

    def of(self, call_id: str) -> Deduction:
        """What a call is to be optimised for now. Raises `UnknownCallError`."""
        self._known(call_id)
        return self._deduced.get(call_id, NOTHING)

    def members(self, group: Stage) -> tuple[str, ...]:
        """The calls of a task group."""
        return self._stages.members(group)

    def asked(self, call_id: str) -> Slo | None:
        """The explicit figures that gets of a call's outputs ask for: of several, the tightest of each kind.

        `jct_s` is end to end: see `jct_shares`. Raises `UnknownCallError`.
        """
        slos = [mark for mark in self._marks_of(call_id) if isinstance(mark, Slo)]
        if not slos:
            return None
        return Slo(
            ttft_s=_tightest(slo.ttft_s for slo in slos),
            tpot_s=_tightest(slo.tpot_s for slo in slos),
            jct_s=_tightest(slo.jct_s for slo in slos),
        )

    def get(self, variable: str, mark: Mark) -> tuple[str, ...]:
        """A client waits for a variable, which nobody may have named yet; nothing is left to deduce for one that is
        set or has failed.
        """
        if self._graph.variable_state(variable) in {VariableState.SET, VariableState.FAILED}:
            return ()
        self._marks.setdefault(variable, []).append(mark)
        return self._settle(self._producer(variable))

    def release(self, variable: str, mark: Mark) -> tuple[str, ...]:
        """A client waits no longer. Once a variable is set or has failed, its gets are answered and gone, and
        releasing one does nothing.
        """
        marks = self._marks.get(variable, [])
        if mark not in marks:
            return ()
        marks.remove(mark)
        if not marks:
            del self._marks[variable]
        return self._settle(self._producer(variable))

    def annotate(self, call_id: str, objective: Objective | None) -> tuple[str, ...]:
        """A call says itself what it is to be optimised for; None takes it back. Raises `UnknownCallError`."""
        self._known(call_id)
        if objective is None:
            self._own.pop(call_id, None)
        else:
            self._own[call_id] = objective
        return self._settle((call_id,))

    def apply(self, effects: Effects) -> tuple[str, ...]:
        """The graph has changed."""
        changed = dict.fromkeys(() if effects.added is None else (effects.added,))
        for links, count in ((effects.linked, 1), (effects.cut, -1)):
            for link in links:
                self._offer(link.producer, self._needs.get(link.consumer), count)
                changed[link.producer] = None
        if effects.variable_set in self._marks:
            del self._marks[effects.variable_set]
            changed |= dict.fromkeys(self._producer(effects.variable_set))
        for failed in effects.variables_failed:
            self._marks.pop(failed.variable, None)
        for ended in effects.ended:
            self._drop(ended.call_id)
        return self._settle(changed)

    def _known(self, call_id: str) -> None:
        if call_id not in self._graph:
            raise UnknownCallError(call_id)

    def _producer(self, variable: str) -> tuple[str, ...]:
        producer = self._graph.producer(variable)
        return () if producer is None else (producer,)

    def _marks_of(self, call_id: str) -> Iterator[Mark]:
        for variable in self._graph.unset_outputs(call_id) if self._marks else ():
            yield from self._marks.get(variable, ())

    def _offer(self, call_id: str, need: Need | None, links: int) -> None:
        if need is None:
            return
        offers = self._offers.get(call_id)
        if offers is None:
            offers = self._offers[call_id] = Offers()
        offers.change(need, links)
        if not offers:
            del self._offers[call_id]

    def _drop(self, call_id: str) -> None:
        """Forget a call that has ended. If it was still in a stage, the awaited call has failed with it, so the others
        of that stage leave it too: they need not be told that they are fewer.
        """
        self._own.pop(call_id, None)
        self._needs.pop(call_id, None)
        self._offers.pop(call_id, None)
        self._deduced.pop(call_id, None)
        self._stages.move(call_id, None)

    def _settle(self, calls: Iterable[str]) -> tuple[str, ...]:
        """Bring up to date what may have changed from `calls` upwards, consumers before producers."""
        graph = self._graph
        moved = {call_id: None for call_id in calls if call_id in graph}
        heap = [(-graph.rank(call_id), call_id) for call_id in moved]
        heapify(heap)
        while heap:
            call_id = heappop(heap)[1]
            before, need = self._needs.get(call_id), self._need_of(call_id)
            if need == before:
                continue
            if need is None:
                del self._needs[call_id]
            else:
                self._needs[call_id] = need
            for producer in graph.producers(call_id):
                self._offer(producer, before, -1)
                self._offer(producer, need, 1)
                if producer not in moved:
                    moved[producer] = None
                    heappush(heap, (-graph.rank(producer), producer))
        for call_id in tuple(moved):
            moved |= dict.fromkeys(self._stages.move(call_id, self._stage_of(call_id)))
        return tuple(call_id for call_id in moved if self._deduce(call_id))

    def _need_of(self, call_id: str) -> Need | None:
        own, marks = self._own.get(call_id), tuple(self._marks_of(call_id))
        if own is Objective.LATENCY or any(mark is not Objective.THROUGHPUT for mark in marks):
            return Stage(call_id, 0)
        offers = self._offers.get(call_id)
        need = None if offers is None else offers.need()
        return need if need is not None or not (own or marks) else Objective.THROUGHPUT

    def _stage_of(self, call_id: str) -> Stage | None:
        need = self._needs.get(call_id)
        return need if isinstance(need, Stage) and self._own.get(call_id) is not Objective.THROUGHPUT else None

    def _deduce(self, call_id: str) -> bool:
        """Renew a call's deduction; returns whether it has changed."""
        before, deduction = self._deduced.get(call_id, NOTHING), self._deduction(call_id)
        if deduction == before:
            return False
        if deduction == NOTHING:
            del self._deduced[call_id]
        else:
            self._deduced[call_id] = deduction
        return True

    def _deduction(self, call_id: str) -> Deduction:
        stage = self._stages.of(call_id)
        if stage is not None:
            return Deduction(Objective.LATENCY, stage.distance, stage if self._stages.is_group(stage) else None)
        return _THROUGHPUT if self._needs.get(call_id) is not None else NOTHING

    def check(self) -> None:
        """Assert the invariants; for tests."""
        self._stages.check()
        assert NOTHING not in self._deduced.values()
        for call_id in (*self._own, *self._needs, *self._offers, *self._deduced):
            assert self._needs.get(call_id) == self._need_of(call_id)
            assert self._stages.of(call_id) == self._stage_of(call_id)
        for call_id, offers in self._offers.items():
            needs = [self._needs.get(consumer) for consumer in self._graph.consumers(call_id)]
            assert offers.counted() == {need: needs.count(need) for need in needs if need is not None}


def _tightest(seconds: Iterable[float | None]) -> float | None:
    return min((given for given in seconds if given is not None), default=None)
