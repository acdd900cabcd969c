"""An application whose calls come one by one, with what is deduced for them."""

from __future__ import annotations

from plait.policy.programs.objectives import Deductions
from plait.policy.programs.request_graph import RequestGraph
from tests.policy.programs.graph_events import unset


class Application:
    """A graph and its deductions; calls are written `name: inputs -> outputs`, native steps with a `*` before."""

    def __init__(self, *calls: str) -> None:
        self.graph = RequestGraph()
        self.deductions = Deductions(self.graph)
        for call in calls:
            self.add(call)

    def add(self, call: str) -> tuple[str, ...]:
        name, _, links = call.partition(":")
        inputs, _, outputs = links.partition("->")
        is_native = name.startswith("*")
        return self.deductions.apply(
            self.graph.add(name, inputs.split(), outputs.split(), is_native=is_native, predicted_s=1.0)
        )

    def run(self, name: str) -> list[str]:
        """The calls whose deductions change while a ready call runs from start to end."""
        graph, apply = self.graph, self.deductions.apply
        outputs, changed = unset(graph, name), [*apply(graph.start(name))]
        for output in outputs:
            changed += apply(graph.produce(name, output))
        return changed if outputs else [*changed, *apply(graph.finish(name))]

    def stages(self) -> dict[str, tuple[str | None, int | None]]:
        """The objective in a word, and the stage, of every call."""
        words = {}
        for name in self.graph.calls:
            deduction = self.deductions.of(name)
            words[name] = ("group" if deduction.group else deduction.objective, deduction.stage)
        return words


MAP_REDUCE = ("map 1:d ->p1", "map 2:d->p2", "reduce:p1 p2->sum", "polish:sum->end")
