"""The longest predicted paths from a session's calls to awaited variables, and each call's share of a JCT.

A job's end-to-end JCT is divided among its calls (docs/design/clocks.md). On the critical path, the time left is
divided in proportion to predicted times. A call beside the critical path also gets its slack. A call is due when the
time left just suffices for the calls that follow it on the longest path to the variable. Its share begins when the last
of its producers is due. So the shares on a path add up to at most the time left, and each share is at least the call's
proportion.

Only waiting calls follow another call, and a waiting call's predicted time does not change. So the path lengths change
only with calls and links, not with time. They are kept from event to event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import inf
from typing import Final

from plait.policy.programs.needs import Marks
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import Link

_NO_PATHS: Final[Mapping[str, float]] = {}


class CriticalPaths:
    """For each call and each timed variable that needs it, the seconds after the call on the longest path there.

    `timed` are the variables that somebody waits for with an end-to-end time.
    Events touch calls. Touched calls are renewed, consumers first.
    Then the producers of each changed call are renewed. The cost grows with the calls and links on changed paths.
    """

    __slots__ = ("_below_s", "_first", "_graph", "_touched", "_waits", "timed")

    def __init__(self, graph: RequestGraph, marks: Marks) -> None:
        self._graph = graph
        self.timed: Collection[str] = marks.timed
        self._below_s: dict[str, dict[str, float]] = {}  # by call and variable
        self._waits: dict[str, int] = {}  # by call: its links to producers; only calls that have some
        self._first: set[str] = set()  # the calls on these paths that wait for no other
        self._touched: set[str] = set()

    def __bool__(self) -> bool:
        """Whether there is a path, or one to look for."""
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
        critical: dict[str, tuple[float, float]] = {}  # by variable: the critical path, and the time left for 1 s of it
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
        """Bring a call's paths to the `moved` variables up to date, or all its paths if it was touched.

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
        """Forget a call that has ended."""
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

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert not self._touched
        assert self._first == self._below_s.keys() - self._waits.keys()
        for call_id in (*self._below_s, *self._waits):
            assert self._below_s.get(call_id, {}) == self._paths_s(call_id, None)
            assert self._waits.get(call_id, 0) == len(self._graph.calls[call_id].producers())
