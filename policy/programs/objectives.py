"""Deduces each call's objective, and its share of a JCT, from what the application waits for (Parrot, 5.2).

A client states an objective in two ways: it *gets* a variable with an objective, or it annotates a call with one. Both
make an awaited call: the variable's producer, or the annotated call. The deduction walks from each awaited call to the
calls upstream, producer by producer:

- `throughput` makes every call upstream a throughput call.
- `latency` gives every call upstream a stage. The awaited call is stage 0. A consumer in stage k puts its producers
  into stage k + 1. So a call's stage is its longest distance to the awaited call. The only call of a stage is a latency
  call. Two or more calls are a task group: the completion time of its last call counts.

Where objectives conflict:

- A call's own annotation wins over its deduction. A call annotated `throughput` is in no task group, but its producers
  get the stages that they would have without the annotation.
- Latency wins over throughput for a call that serves both.
- If a call's consumers are in stages of several awaited calls, the call takes the smallest stage that they offer. Ties:
  the awaited call with the smaller id. A consumer offers only its own stage, so a call has one stage, however many
  variables are awaited. An awaited call is always in its own stage 0.
- A session may have an objective for all of its calls (`prefer`). With `latency`, the calls without consumers and gets
  form a stage, because without further knowledge they are siblings.
- A native step runs on no engine. It has no objective and is in no stage, and distances do not count it. If its output
  is awaited, its producers are stage 0.
- A get with an explicit `Slo` counts as `latency`; `asked` returns its figures.

The deduction depends only on the graph's calls, its links and the marks, not on their order of arrival. A call that has
ended is not in the graph. The last call left of a group becomes a latency call, because only it delays the next stage.

A get with an end-to-end JCT needs more than a stage: `CriticalPaths` divides the JCT among the job's calls
(docs/design/clocks.md). On the critical path, the time left is divided in proportion to predicted times. A call beside
the critical path also gets its slack. A call is due when the time left just suffices for the calls that follow it on
the longest path to the variable. Its share begins when the last of its producers is due. So the shares on a path add
up to at most the time left, and each share is at least the call's proportion.

Only waiting calls follow another call, and a waiting call's predicted time does not change. So the path lengths change
only with calls and links, not with time. They are kept from event to event.

`slo_of` turns a deduced objective into the SLO fields of a call, which the local schedulers understand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, NamedTuple

from plait.policy.programs.needs import LAST_STAGE, Mark, Marks, Needs, Stage, Stages
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import Effects, Link, VariableState, unknown_call
from plait.policy.types import NO_SLO, Objective, Slo


class Deduction(NamedTuple):
    """A call's deduced objective (Parrot, 5.2)."""

    objective: Objective | None = None
    """None: no get and no annotation reaches the call."""
    stage: int | None = None
    """The calls after it on the longest path to the awaited call; None unless it is a latency call."""
    group: Stage | None = None
    """The task group: one value for all of its calls, as long as the group exists."""
    is_guess: bool = False
    """Only the session's objective is known, not which call or get needs this call."""


NOTHING = Deduction()
"""No get and no annotation reaches the call."""
_THROUGHPUT = Deduction(Objective.THROUGHPUT)


_NO_PATHS: Final[Mapping[str, float]] = {}


class CriticalPaths:
    """For each call and each timed variable that needs it, the seconds after the call on the longest path there.

    `timed` are the variables with a get for an end-to-end time. Events touch calls. A renewal goes upstream from the
    touched calls, consumers first, as long as paths change: it costs as much as there are calls and links on them.
    """

    __slots__ = ("_below_s", "_first", "_graph", "_touched", "_waits", "timed")

    def __init__(self, graph: RequestGraph, marks: Marks) -> None:
        self._graph = graph
        self.timed: Collection[str] = marks.timed
        self._below_s: dict[str, dict[str, float]] = {}  # by call and variable
        self._waits: dict[str, int] = {}  # by call: its links to producers, if it has any
        self._first: set[str] = set()  # the calls on timed paths without producers, at which critical paths begin
        self._touched: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._below_s or self._touched)

    def upstream(self, variable: str) -> Iterator[str]:
        """The calls that a timed variable still needs; empty if no call produces it."""
        return (call_id for call_id, below_s in self._below_s.items() if variable in below_s)

    def shares(
        self, call_ids: Iterable[str], left_s: Callable[[str], float], call_left_s: Callable[[str], float]
    ) -> dict[str, float]:
        """The share of each of these ready calls, in seconds from now. If several JCTs apply, the tightest counts.

        `left_s` is the time until a timed variable is due. `call_left_s` is the time that a call still takes. Calls
        that no timed variable needs have no share. O(calls without producers on the paths, times the variables).
        """
        shares: dict[str, float] = {}
        critical: dict[str, tuple[float, float]] = {}  # by variable: (critical path, time left for each second of it)
        for call_id in call_ids:
            for variable, below_s in self._below_s.get(call_id, _NO_PATHS).items():
                if variable not in critical:
                    length_s = self._critical_s(variable, call_left_s)
                    critical[variable] = length_s, max(0.0, left_s(variable)) / length_s if length_s else 0.0
                length_s, stretch = critical[variable]
                shares[call_id] = min(stretch * (length_s - below_s), shares.get(call_id, inf))
        return shares

    def _critical_s(self, variable: str, call_left_s: Callable[[str], float]) -> float:
        """The length of a variable's critical path, which begins with a call that waits for no other call."""
        length_s = 0.0
        for call_id in self._first:
            below_s = self._below_s[call_id].get(variable)
            if below_s is not None:
                length_s = max(length_s, below_s + call_left_s(call_id))
        return length_s

    def link(self, link: Link, count: int) -> None:
        """A link has come (1) or gone (-1)."""
        waits = self._waits.get(link.consumer, 0) + count
        if waits:
            self._waits[link.consumer] = waits
            self._first.discard(link.consumer)
        else:
            del self._waits[link.consumer]
            if link.consumer in self._below_s:
                self._first.add(link.consumer)
        if count < 0:
            self.touch(link.producer)

    def touch(self, call_id: str) -> None:
        """A call's outputs or consumers have changed: all its paths have to be renewed."""
        if self.timed or call_id in self._below_s:
            self._touched.add(call_id)

    def renew(self, call_id: str, moved: set[str]) -> bool:
        """Update a call's paths to the `moved` variables, or all its paths if it was touched.

        Returns whether the length of a path changed, and adds the variables of such paths to `moved`.
        """
        if call_id in self._touched:
            self._touched.remove(call_id)
            after_s = self._paths_s(call_id, None)
        elif moved and (self.timed or self._below_s):
            after_s = self._paths_s(call_id, moved)
        else:
            return False
        before_s = self._below_s.get(call_id, _NO_PATHS)
        changed = [name for name, path_s in after_s.items() if path_s != before_s.get(name)]
        if not changed:
            return False
        paths_s = {name: path_s for name, path_s in {**before_s, **after_s}.items() if path_s is not None}
        if paths_s:
            self._below_s[call_id] = paths_s
            if call_id not in self._waits:
                self._first.add(call_id)
        else:
            del self._below_s[call_id]
            self._first.discard(call_id)
        moved.update(changed)
        return True

    def drop(self, call_id: str) -> None:
        self._below_s.pop(call_id, None)
        self._waits.pop(call_id, None)
        self._first.discard(call_id)
        self._touched.discard(call_id)

    def _paths_s(self, call_id: str, variables: Iterable[str] | None) -> dict[str, float | None]:
        """The seconds after a call on the longest path to each variable; None if there is no path."""
        kept_s, node = self._below_s, self._graph.calls[call_id]
        behind = [(kept_s[call.call_id], call.predicted_s) for _, call in node.edges() if call.call_id in kept_s]
        own = [output.name for output in node.unset if output.name in self.timed]
        if variables is None:
            variables = {*own, *self._below_s.get(call_id, ()), *(name for paths_s, _ in behind for name in paths_s)}
        found: dict[str, float | None] = {}
        for name in variables:
            least_s = 0.0 if name in own else None
            found[name] = max([paths_s[name] + own_s for paths_s, own_s in behind if name in paths_s], default=least_s)
        return found


class Deductions:
    """The deductions of one session's graph. Call `apply` with the effects of every event of the graph.

    Every event returns the calls whose deduction has changed. Its cost grows with the calls whose need changes, and
    with their links. Without marks, an event visits no calls. The same pass renews `paths`, for the shares of
    end-to-end times.
    """

    __slots__ = ("_deduced", "_graph", "_is_silent", "_marks", "_needs", "_stages", "paths")

    def __init__(self, graph: RequestGraph) -> None:
        self._graph = graph
        self._marks = Marks(graph)
        self._needs = Needs(graph, self._marks)
        self._stages = Stages()
        self._deduced: dict[str, Deduction] = {}
        self._is_silent = True  # there are no marks and no annotations, so nothing can be deduced
        self.paths = CriticalPaths(graph, self._marks)

    def of(self, call_id: str) -> Deduction:
        """A call's deduction now. Raises `GraphError` for a call that is not in the graph."""
        if call_id not in self._graph.calls:
            raise unknown_call(call_id)
        return self._deduced.get(call_id, NOTHING)

    def members(self, group: Stage) -> tuple[str, ...]:
        return self._stages.members(group)

    def asked(self, call_id: str) -> Slo | None:
        """The explicit times in the gets of a call's outputs: the tightest of each kind.

        `jct_s` is end to end: see `CriticalPaths`. Raises as `of` does.
        """
        return self._marks.asked(call_id)

    def get(self, variable: str, mark: Mark) -> tuple[str, ...]:
        """A client waits for a variable, which need not be in the graph. No effect if it is set or has failed."""
        if self._graph.variable_state(variable) in {VariableState.SET, VariableState.FAILED}:
            return ()
        self._marks.add(variable, mark)
        return self._settle(self._producer(variable), variable)

    def release(self, variable: str, mark: Mark) -> tuple[str, ...]:
        """A client no longer waits for a variable. No effect once the variable is set or has failed."""
        return self._settle(self._producer(variable), variable) if self._marks.remove(variable, mark) else ()

    def annotate(self, call_id: str, objective: Objective | None) -> tuple[str, ...]:
        """A call states its own objective; None takes it back. Raises as `of` does."""
        self._graph.call(call_id)
        self._marks.annotate(call_id, objective)
        return self._settle((call_id,))

    def prefer(self, objective: Objective | None, calls: Iterable[str]) -> tuple[str, ...]:
        """The session states an objective for all of its `calls`; None takes it back."""
        self._marks.of_session = objective
        return self._settle(calls)

    def apply(self, effects: Effects) -> tuple[str, ...]:
        changed: dict[str, None] = {}
        if effects.added is not None:
            changed[effects.added] = None
            self.paths.touch(effects.added)
        for links, count in ((effects.linked, 1), (effects.cut, -1)):
            for link in links:
                self.paths.link(link, count)
                if link.producer in self._graph.calls:  # ended calls are dropped below
                    self._needs.link(link, count)
                    changed[link.producer] = None
        if effects.variable_set is not None and effects.variable_set in self._marks:
            self._marks.answer(effects.variable_set)
            for producer in self._producer(effects.variable_set):
                changed[producer] = None
                self.paths.touch(producer)
        for failed in effects.variables_failed:
            self._marks.answer(failed.variable)
        for ended in effects.ended:
            changed |= dict.fromkeys(self._drop(ended.call_id))
        return self._settle(changed) if changed and not self._is_silent else ()

    def _producer(self, variable: str) -> tuple[str, ...]:
        """The call that produces a variable or has just produced it; empty if the call has ended."""
        producer = self._graph.producer(variable)
        return (producer,) if producer is not None and producer in self._graph.calls else ()

    def _drop(self, call_id: str) -> tuple[str, ...]:
        """Forget a call that has ended. Returns the call that is left alone in its stage, if there is one."""
        self._marks.annotate(call_id, None)
        self._needs.drop(call_id)
        self.paths.drop(call_id)
        self._deduced.pop(call_id, None)
        return self._stages.move(call_id, None)

    def _settle(self, calls: Iterable[str], *marked: str) -> tuple[str, ...]:
        """Update needs, paths and deductions from `calls` upstream, consumers before producers."""
        nodes, paths_moved = self._graph.calls, set(marked)
        moved = {call_id: None for call_id in calls if call_id in nodes}
        queued = set(moved)
        heap = [(-nodes[call_id].rank, call_id) for call_id in moved]
        heapify(heap)
        while heap:
            call_id = heappop(heap)[1]
            need_moved = call_id in moved and self._needs.renew(call_id)
            if not self.paths.renew(call_id, paths_moved) and not need_moved:
                continue
            for producer in nodes[call_id].producers():
                if need_moved:
                    moved[producer] = None
                if producer not in queued:
                    queued.add(producer)
                    heappush(heap, (-nodes[producer].rank, producer))
        for call_id in tuple(moved):
            for other in self._stages.move(call_id, self._needs.stage(call_id)):
                moved[other] = None
        self._is_silent = not (self._marks or self._needs or self.paths)
        return tuple([call_id for call_id in moved if self._deduce(call_id)])

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
            group = stage if self._stages.is_group(stage) else None
            return Deduction(Objective.LATENCY, stage.distance, group, stage == LAST_STAGE)
        return _THROUGHPUT if self._needs.reach(call_id) else NOTHING


LATENCY_SLO: Final = Slo(ttft_s=1.0, tpot_s=0.040, is_deduced=True)
"""The SLO of a deduced latency call. Parrot's evaluation (section 8.1) limits latency-sensitive calls to 40 ms a token.
People do not read intermediate results, so no tighter TPOT is needed. The TTFT of 1 s is ours: the call should not
queue.
"""

GROUP_STRETCH: Final = 1.95
"""The ratio of a task group's common JCT to the time of its slowest call alone on an engine. A group should run in
large batches. Batches with 8.2 times the throughput have 95 % more latency (Parrot, section 3).
"""


def states_times(own: Slo | None, asked: Slo | None) -> bool:
    """Whether a client has stated a time of a call's SLO: its own annotation, or a TTFT or TPOT `asked` for its output.

    Otherwise the whole SLO is deduced, even a share of an end-to-end JCT: no client waits for this call itself.
    """
    return own not in {None, NO_SLO} or (asked is not None and asked._replace(jct_s=None) != NO_SLO)


def slo_of(
    deduction: Deduction,
    slowest_s: float,
    *,
    own: Slo | None = None,
    asked: Slo | None = None,
    share_s: float | None = None,
    latency: Slo = LATENCY_SLO,
) -> Slo | None:
    """The SLO of a call, in seconds from when it is ready; None if it has none (Parrot, section 5.2).

    `own` is the call's annotation. If it states any time, it is the whole SLO. Otherwise only latency calls have an
    SLO: the call's `share_s` of an end-to-end JCT (see `CriticalPaths`), and the TTFT and TPOT `asked` for its output.
    A share of 0 or less does not count: the job is late already.

    A latency call without such times has a default. In a task group, the default is the group's common JCT. It follows
    from `slowest_s`, the longest predicted time of the group's calls, each alone on an engine. For any other latency
    call, the default is `latency`.
    """
    if own is not None and own != NO_SLO:
        return own
    if deduction.objective is not Objective.LATENCY:
        return None
    explicit = Slo(
        ttft_s=None if asked is None else asked.ttft_s,
        tpot_s=None if asked is None else asked.tpot_s,
        jct_s=share_s if share_s is not None and share_s > 0 else None,
    )
    if explicit != NO_SLO:
        return explicit
    return latency if deduction.group is None else Slo(jct_s=GROUP_STRETCH * slowest_s, is_deduced=True)
