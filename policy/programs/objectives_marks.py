"""The objectives that clients state: marks on the variables that they get, and annotations of calls (Parrot, 4.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from plait.policy.programs.request_graph_view import RequestGraphView
from plait.policy.types import Objective, Slo

Mark = Objective | Slo
"""The objective of a `get`, or its explicit times (Parrot, section 4.1)."""


class Marks:
    """The marks on variables that have no value yet, and the annotations of calls that have not ended.

    `timed` are the variables with a mark for an end-to-end time (JCT). `of_session` is the objective of all that the
    session makes (None: none).
    """

    __slots__ = ("_annotations", "_by_variable", "_graph", "of_session", "timed")

    def __init__(self, graph: RequestGraphView) -> None:
        self._graph = graph
        self._by_variable: dict[str, list[Mark]] = {}
        self._annotations: dict[str, Objective] = {}
        self.timed: set[str] = set()
        self.of_session: Objective | None = None

    def __contains__(self, variable: object) -> bool:
        """Whether the variable has a mark."""
        return variable in self._by_variable

    def add(self, variable: str, mark: Mark) -> None:
        """A client waits for a variable."""
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
        """A variable is set or has failed: its gets are answered."""
        self._by_variable.pop(variable, None)
        self.timed.discard(variable)

    def annotate(self, call_id: str, objective: Objective | None) -> None:
        """A call states its own objective; None takes it back."""
        if objective is None:
            self._annotations.pop(call_id, None)
        else:
            self._annotations[call_id] = objective

    def annotation(self, call_id: str) -> Objective | None:
        """A call's own objective; None without an annotation."""
        return self._annotations.get(call_id)

    def on(self, call_id: str) -> Iterator[Mark]:
        """The marks on the outputs that a call has still to produce."""
        for variable in self._graph.unset_outputs(call_id) if self._by_variable else ():
            yield from self._by_variable.get(variable, ())

    def asked(self, call_id: str) -> Slo | None:
        """The explicit times in the marks on a call's outputs: the tightest of each kind; None without such a mark."""
        slos = [mark for mark in self.on(call_id) if isinstance(mark, Slo)]
        if not slos:
            return None
        return Slo(
            ttft_s=_tightest(slo.ttft_s for slo in slos),
            tpot_s=_tightest(slo.tpot_s for slo in slos),
            jct_s=_tightest(slo.jct_s for slo in slos),
        )

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert all(self._by_variable.values()), "an empty list was left behind"
        assert all(call_id in self._graph for call_id in self._annotations)
        timed = {name for name, marks in self._by_variable.items() if any(_jct_s(mark) is not None for mark in marks)}
        assert self.timed == timed


def _jct_s(mark: Mark) -> float | None:
    return mark.jct_s if isinstance(mark, Slo) else None


def _tightest(seconds: Iterable[float | None]) -> float | None:
    return min((given for given in seconds if given is not None), default=None)
