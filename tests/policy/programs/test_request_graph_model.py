"""The request graph against a model that works everything out anew from sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.policy.programs.request_graph import CLIENT, RequestGraph
from plait.policy.programs.request_graph_state import (
    FURTHEST_CAUSES,
    CallState,
    Cause,
    CycleError,
    Effects,
    Failed,
    GraphError,
    InputFailed,
    VariableState,
)
from tests.invariants import check
from tests.policy.programs.graph_events import refused

VARIABLES = [f"v{number}" for number in range(7)]
CALLS = [f"c{number}" for number in range(7)]
NAMES = st.lists(st.sampled_from(VARIABLES), max_size=3)


@dataclass
class Spec:
    inputs: list[str]
    outputs: list[str]
    started: bool = False
    produced: int = 0

    @property
    def unset(self) -> list[str]:
        return self.outputs[self.produced :]


@dataclass
class Model:
    """What was done, and everything else worked out from it by going through all there is."""

    live: dict[str, Spec] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def variable_state(self, name: str) -> VariableState | None:
        if name in self.values:
            return VariableState.SET
        if name in self.failed:
            return VariableState.FAILED
        if name in self.owner:
            return VariableState.PENDING
        return VariableState.EMPTY if any(name in spec.inputs for spec in self.live.values()) else None

    def call_state(self, call_id: str) -> CallState | None:
        spec = self.live.get(call_id)
        if spec is None:
            return None
        if spec.started:
            return CallState.RUNNING
        return CallState.READY if set(spec.inputs) <= self.values else CallState.WAITING

    def in_state(self, state: CallState) -> list[str]:
        return [call_id for call_id in self.live if self.call_state(call_id) is state]

    def links(self) -> Counter[tuple[str, str]]:
        return Counter(
            (self.owner[name], call_id)
            for call_id, spec in self.live.items()
            for name in set(spec.inputs)
            if self.variable_state(name) is VariableState.PENDING
        )

    def would_cycle(self, inputs: list[str], outputs: list[str]) -> bool:
        reached, size = set(outputs), -1
        while len(reached) != size:
            size = len(reached)
            for spec in self.live.values():
                if reached & set(spec.inputs):
                    reached |= set(spec.unset)
        return bool(reached & set(inputs))

    def collapse(self) -> None:
        """End every call with a failed input until there is none."""
        for call_id, spec in list(self.live.items()):
            if self.failed & set(spec.inputs):
                self.failed |= set(spec.unset)
                del self.live[call_id]
                self.collapse()
                return


@given(seed=st.integers(0, 2**32))
def test_calls_may_come_in_any_order_and_the_one_that_closes_a_cycle_is_refused(seed: int) -> None:
    random, graph, model, calls = Random(seed), RequestGraph(), Model(), 14
    for number in random.sample(range(calls), calls):
        call_id, taken = f"c{number}", [f"v{random.randrange(calls)}" for _ in range(random.randint(0, 2))]
        spec = Spec(taken, [f"v{number}"])
        if model.would_cycle(taken, spec.outputs):
            error = refused(graph, partial(graph.add, call_id, taken, spec.outputs), CycleError)
            assert isinstance(error, CycleError)
            specs = {call_id: spec, **model.live}
            assert error.path[0] == error.path[-1] == call_id
            for call, variable, consumer in zip(error.path[:-1:2], error.path[1::2], error.path[2::2], strict=True):
                assert variable in specs[call].outputs
                assert variable in specs[consumer].inputs
        else:
            graph.add(call_id, taken, spec.outputs)
            model.live[call_id] = spec
        check(graph)


class Session(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.graph = RequestGraph()
        self.model = Model()
        self.named: set[tuple[str, str]] = set()  # every call and input, every output and call there ever was

    def happens(self, event: Callable[[], Effects], change: Callable[[], None], *, legal: bool) -> None:
        """The event's effects are the difference that it makes to the model, or it is refused."""
        if not legal:
            refused(self.graph, event, GraphError)
            return
        model = self.model
        ready, live, failed, links = (
            set(model.in_state(CallState.READY)),
            dict(model.live),
            set(model.failed),
            model.links(),
        )
        effects = event()
        change()
        now_ready = [call_id for call_id in model.in_state(CallState.READY) if call_id not in ready]
        assert list(effects.ready) == now_ready
        assert {name for name, _ in effects.variables_failed} == model.failed - failed
        added = set() if effects.added is None else {effects.added}
        assert sorted(ended.call_id for ended in effects.ended) == sorted((live.keys() | added) - model.live.keys())
        links.update(effects.linked)
        links.subtract(effects.cut)
        assert min(links.values(), default=0) >= 0
        assert {link: n for link, n in links.items() if n and model.live.keys() >= set(link)} == dict(model.links())
        for ended in effects.ended:
            self.caused(ended.cause)
        assert effects.variables_failed == tuple(
            Failed(name, cause) for name, cause in effects.variables_failed if self.graph.cause(name) is cause
        )

    def caused(self, cause: Cause | None) -> None:
        """Each link of the chain names an input that the next one's call was to produce."""
        for link, before in pairwise(cause or ()):
            assert isinstance(link.what, InputFailed)
            name = link.what.variable
            assert {(link.where, name), (name, before.where)} <= self.named
        if cause is not None:
            chain = list(cause)
            assert (cause.length, list(cause.furthest)) == (len(chain), chain[1:][-FURTHEST_CAUSES:])
            assert cause.root is chain[-1]

    @precondition(lambda self: len(self.model.live) < len(CALLS))
    @rule(data=st.data(), inputs=NAMES)
    def add(self, data: st.DataObject, inputs: list[str]) -> None:
        call_id = data.draw(st.sampled_from([call_id for call_id in CALLS if call_id not in self.model.live]))
        free = [name for name in VARIABLES if name not in (*self.model.owner, *inputs)]
        self.add_anything(call_id, inputs, data.draw(st.permutations(free))[: data.draw(st.integers(1, 2))])

    @rule(call_id=st.sampled_from(CALLS), inputs=NAMES, outputs=NAMES)
    def add_anything(self, call_id: str, inputs: list[str], outputs: list[str]) -> None:
        model, spec = self.model, Spec(inputs, outputs)
        legal = (
            call_id not in model.live
            and len(set(outputs)) == len(outputs)
            and not set(outputs) & model.owner.keys()
            and not model.would_cycle(inputs, outputs)
        )

        def change() -> None:
            model.live[call_id] = spec
            model.owner |= dict.fromkeys(outputs, call_id)
            model.collapse()

        if legal:
            self.named |= {(call_id, name) for name in inputs} | {(name, call_id) for name in outputs}
        self.happens(lambda: self.graph.add(call_id, inputs, outputs), change, legal=legal)

    @rule(name=st.sampled_from(VARIABLES))
    def set_value(self, name: str) -> None:
        def change() -> None:
            self.model.owner[name] = CLIENT
            self.model.values.add(name)

        self.happens(lambda: self.graph.set_value(name), change, legal=name not in self.model.owner)

    @precondition(lambda self: self.model.in_state(CallState.READY))
    @rule(data=st.data())
    def start_one(self, data: st.DataObject) -> None:
        self.start(data.draw(st.sampled_from(self.model.in_state(CallState.READY))))

    @precondition(lambda self: self.model.in_state(CallState.RUNNING))
    @rule(data=st.data())
    def produce_or_finish_one(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(self.model.in_state(CallState.RUNNING)))
        unset = self.model.live[call_id].unset
        if unset:
            self.produce(call_id, unset[0])
        else:
            self.finish(call_id)

    @precondition(lambda self: len(self.model.live) > 2)
    @rule(data=st.data(), fail=st.booleans())
    def break_one_off(self, data: st.DataObject, fail: bool) -> None:
        call_id = data.draw(st.sampled_from(list(self.model.live)))
        event = self.graph.fail if fail else self.graph.cancel
        self.happens(lambda: event(call_id, "why"), lambda: self.end(call_id), legal=True)

    @rule(call_id=st.sampled_from(CALLS))
    def start(self, call_id: str) -> None:
        def change() -> None:
            self.model.live[call_id].started = True

        legal = self.model.call_state(call_id) is CallState.READY
        self.happens(lambda: self.graph.start(call_id), change, legal=legal)

    @rule(call_id=st.sampled_from(CALLS), name=st.sampled_from(VARIABLES))
    def produce(self, call_id: str, name: str) -> None:
        spec = self.model.live.get(call_id, Spec([], []))

        def change() -> None:
            spec.produced += 1
            self.model.values.add(name)
            if not spec.unset:
                self.end(call_id)

        legal = spec.started and spec.unset[:1] == [name]
        self.happens(lambda: self.graph.produce(call_id, name), change, legal=legal)

    @rule(call_id=st.sampled_from(CALLS))
    def finish(self, call_id: str) -> None:
        spec = self.model.live.get(call_id, Spec([], []))
        legal = spec.started and not spec.unset
        self.happens(lambda: self.graph.finish(call_id), lambda: self.end(call_id), legal=legal)

    def end(self, call_id: str) -> None:
        self.model.failed |= set(self.model.live.pop(call_id).unset)
        self.model.collapse()

    @rule(name=st.sampled_from(VARIABLES))
    def forget(self, name: str) -> None:
        live = self.model.live.values()
        if self.model.variable_state(name) is None or any(name in (*s.inputs, *s.outputs) for s in live):
            refused(self.graph, lambda: self.graph.forget(name), GraphError)
            return
        self.graph.forget(name)
        self.model.owner.pop(name, None)
        self.model.values.discard(name)
        self.model.failed.discard(name)

    @invariant()
    def the_graph_knows_what_the_model_works_out(self) -> None:
        graph, model = self.graph, self.model
        check(graph)
        for name in VARIABLES:
            assert graph.variable_state(name) == model.variable_state(name)
            assert graph.producer(name) == model.owner.get(name)
        for call_id in CALLS:
            assert graph.call_state(call_id) == model.call_state(call_id)
            assert (call_id in graph) == (call_id in model.live)
        counts = tuple(graph.counts[state] for state in (CallState.WAITING, CallState.READY, CallState.RUNNING))
        states = (CallState.WAITING, CallState.READY, CallState.RUNNING)
        assert counts == tuple(len(model.in_state(state)) for state in states)
        assert len(graph.variables) == sum(model.variable_state(name) is not None for name in VARIABLES)
        assert Counter(self.links(graph)) == model.links()
        assert Counter((a, b) for a in model.live for b in graph.consumers(a)) == model.links()
        assert all(graph.call(producer).rank < graph.call(consumer).rank for producer, consumer in self.links(graph))

    def links(self, graph: RequestGraph) -> Iterator[tuple[str, str]]:
        return ((producer, call_id) for call_id in self.model.live for producer in graph.call(call_id).producers())


TestSession = Session.TestCase
