"""The request graph by its stories, and against a model that works everything out anew from sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.policy.programs import request_graph_node
from plait.policy.programs.request_graph import CLIENT, RequestGraph
from plait.policy.programs.request_graph_effects import NO_EFFECTS, Effects, Failed, Link
from plait.policy.programs.request_graph_state import (
    CALL_TRANSITIONS,
    FURTHEST_CAUSES,
    VARIABLE_TRANSITIONS,
    CallState,
    Cause,
    CycleError,
    DoubleProducerError,
    DuplicateCallError,
    GraphError,
    GraphTransitionError,
    InputFailed,
    UnknownCallError,
    UnknownVariableError,
    VariableInUseError,
    VariableState,
)


def trail(cause: Cause | None) -> list[tuple[str, str]]:
    return [] if cause is None else [(link.where, str(link.what)) for link in cause]


def run(graph: RequestGraph, call_id: str, *outputs: str) -> list[Effects]:
    """A ready call from its start to its end."""
    return [
        graph.start(call_id),
        *(graph.produce(call_id, output) for output in outputs),
        graph.finish(call_id),
    ]


def refused(graph: RequestGraph, event: Callable[[], object], error: type[GraphError]) -> GraphError:
    """The error of an event that leaves the graph as it was."""
    before = repr(snapshot(graph))
    with pytest.raises(error) as caught:
        event()
    assert repr(snapshot(graph)) == before
    return caught.value


def snapshot(graph: RequestGraph) -> object:
    return (
        graph._store.counts,
        {
            name: (variable.state, variable.producer, trail(variable.cause), list(variable.consumers))
            for name, variable in graph._store.variables.items()
        },
        [
            (node, node.missing, node.produced, [v.name for v in node.inputs], [v.name for v in node.outputs])
            for node in graph._store.calls.values()
        ],
    )


# Stories


def test_a_call_is_ready_when_its_last_input_has_a_value() -> None:
    graph = RequestGraph()
    assert graph.add("code", ["task"], ["program"]).ready == ()
    assert graph.add("test", ["task", "program"], ["report"]).linked == (Link("code", "test"),)
    assert graph.set_value("task") == Effects(ready=("code",), variable_set="task")
    assert graph.start("code") == NO_EFFECTS
    assert graph.produce("code", "program") == Effects(
        ready=("test",), variable_set="program", cut=(Link("code", "test"),)
    )
    view = graph.view
    assert (view.waiting_calls, view.ready_calls, view.running_calls, view.variables) == (0, 1, 1, 3)
    (ended,) = graph.finish("code").ended
    assert (ended.call_id, ended.state, ended.cause) == ("code", CallState.FINISHED, None)
    assert "code" not in graph.view
    assert graph.view.variable_state("program") is VariableState.SET, "the call is gone, its output is not"
    assert graph.view.producer("program") == "code"
    graph.check()


def test_calls_become_ready_in_the_order_in_which_they_came() -> None:
    graph = RequestGraph()
    calls = [f"map {number}" for number in (3, 1, 2, 0)]
    for call_id in calls:
        graph.add(call_id, ["document", "document"], [f"summary of {call_id}"])
    assert graph.set_value("document").ready == tuple(calls)


def test_a_call_without_inputs_or_with_all_of_them_set_is_ready_at_once() -> None:
    graph = RequestGraph()
    graph.set_value("x")
    assert graph.add("a", [], []).ready == ("a",)
    assert graph.add("b", ["x"], ["y"]).ready == ("b",)


def test_outputs_are_produced_in_order_and_each_wakes_its_own_consumers() -> None:
    graph = RequestGraph()
    graph.add("two", [], ["x", "y"])
    graph.add("of x", ["x"], [])
    graph.add("of y", ["y"], [])
    graph.start("two")
    refused(graph, lambda: graph.produce("two", "y"), GraphTransitionError)
    assert graph.produce("two", "x").ready == ("of x",)
    refused(graph, lambda: graph.finish("two"), GraphTransitionError)
    assert graph.view.unset_outputs("two") == ("y",)
    assert graph.produce("two", "y").ready == ("of y",)
    refused(graph, lambda: graph.produce("two", "y"), GraphTransitionError)


def test_a_failure_takes_everybody_who_waits_for_it_each_with_the_chain_of_causes() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x"])
    graph.add("b", ["x"], ["y"])
    graph.add("c", ["y", "z"], ["w"])
    graph.add("other", ["z"], [])
    graph.start("a")
    effects = graph.fail("a", "the engine stopped answering")
    assert [(ended.call_id, ended.state) for ended in effects.ended] == [
        (name, CallState.FAILED) for name in ("a", "b", "c")
    ]
    assert [failed.variable for failed in effects.variables_failed] == ["x", "y", "w"]
    assert trail(effects.ended[-1].cause) == [
        ("c", "its input y failed"),
        ("b", "its input x failed"),
        ("a", "the engine stopped answering"),
    ]
    cause = graph.view.cause("w")
    assert cause is effects.variables_failed[-1].cause
    assert cause is not None
    assert cause.root.where == "a"
    assert str(cause) == (
        "c: its input y failed, because b: its input x failed, because a: the engine stopped answering"
    )
    assert graph.view.call_state("other") is CallState.WAITING
    graph.check()


def test_what_was_produced_before_the_failure_keeps_its_value() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x", "y"])
    graph.add("b", ["x", "y"], [])
    graph.add("c", ["x"], [])
    graph.start("a")
    graph.produce("a", "x")
    effects = graph.fail("a", "preempted for good")
    assert [ended.call_id for ended in effects.ended] == ["a", "b"]
    assert graph.view.variable_state("x") is VariableState.SET
    assert graph.view.call_state("c") is CallState.READY


def test_a_call_that_comes_after_the_failure_fails_at_once_and_so_do_those_that_wait_for_it() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x"])
    graph.cancel("a")
    graph.add("last", ["y", "z"], ["w"])
    graph.add("z", [], ["z"])
    effects = graph.add("late", ["x"], ["y"])
    assert effects.added == "late"
    assert effects.ready == ()
    assert [ended.call_id for ended in effects.ended] == ["late", "last"]
    assert effects.cut == (Link("z", "last"),)
    assert trail(effects.ended[-1].cause)[-1] == ("a", "it was cancelled")
    assert graph.view.variable_state("y") is graph.view.variable_state("w") is VariableState.FAILED
    graph.check()


def test_a_cancelled_call_is_cancelled_and_its_consumers_fail() -> None:
    graph = RequestGraph()
    graph.add("a", ["never"], ["x"])
    graph.add("b", ["x"], [])
    assert [(ended.call_id, ended.state) for ended in graph.cancel("a", "the client left").ended] == [
        ("a", CallState.CANCELLED),
        ("b", CallState.FAILED),
    ]
    assert graph.view.variable_state("never") is None, "nobody names it any more"


def test_a_variable_has_one_producer() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x"])
    graph.set_value("given")
    error = refused(graph, lambda: graph.add("b", [], ["y", "x"]), DoubleProducerError)
    assert isinstance(error, DoubleProducerError)
    assert (error.variable, error.first, error.second) == ("x", "a", "b")
    assert str(error) == "variable 'x' already has the producer 'a': 'b' needs another variable"
    for event, first, second in (
        (lambda: graph.set_value("x"), "a", CLIENT),
        (lambda: graph.set_value("given"), CLIENT, CLIENT),
        (lambda: graph.add("b", [], ["given"]), CLIENT, "b"),
        (lambda: graph.add("b", [], ["z", "z"]), "b", "b"),
    ):
        error = refused(graph, event, DoubleProducerError)
        assert isinstance(error, DoubleProducerError)
        assert (error.first, error.second) == (first, second)
    run(graph, "a", "x")
    refused(graph, lambda: graph.add("a", [], ["x"]), DoubleProducerError)


def test_a_cycle_is_refused_with_its_path() -> None:
    graph = RequestGraph()
    graph.add("a", ["x"], ["y"])
    graph.add("b", ["y"], ["z", "other"])
    graph.add("c", ["other"], ["end"])
    error = refused(graph, lambda: graph.add("d", ["z", "end"], ["x"]), CycleError)
    assert isinstance(error, CycleError)
    assert error.path[:5] == ("d", "x", "a", "y", "b")
    assert error.path[5:] in {("z", "d"), ("other", "c", "end", "d")}
    error = refused(graph, lambda: graph.add("e", ["self"], ["self"]), CycleError)
    assert str(error) == "a call cannot wait for its own output: e -> self -> e"
    assert graph.add("d", ["z"], ["elsewhere"]).linked == (Link("b", "d"),)


def test_a_call_id_is_free_again_when_its_call_has_ended() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x"])
    refused(graph, lambda: graph.add("a", [], ["y"]), DuplicateCallError)
    run(graph, "a", "x")
    refused(graph, lambda: graph.finish("a"), UnknownCallError)
    graph.add("a", [], ["y"])
    assert graph.view.users("x") == (), "that was another call"
    graph.forget("x")
    graph.check()


def test_what_is_forgotten_can_be_produced_again() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x"])
    refused(graph, lambda: graph.forget("x"), VariableInUseError)
    graph.fail("a", "no engine")
    graph.forget("x")
    refused(graph, lambda: graph.forget("x"), UnknownVariableError)
    graph.add("again", [], ["x"])
    graph.add("b", ["x"], [])
    run(graph, "again", "x")
    error = refused(graph, lambda: graph.forget("x"), VariableInUseError)
    assert isinstance(error, VariableInUseError)
    assert error.users == ("b",)
    run(graph, "b")
    graph.forget("x")
    assert graph.view.variables == 0
    assert repr(graph) == "RequestGraph(variables=0, )"


def test_a_running_producer_keeps_its_outputs_from_being_forgotten() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x", "y"])
    graph.start("a")
    graph.produce("a", "x")
    assert graph.view.users("x") == ("a",)
    refused(graph, lambda: graph.forget("x"), VariableInUseError)


@pytest.mark.parametrize(
    "event",
    [
        lambda graph: graph.start("waiting"),
        lambda graph: graph.produce("waiting", "x"),
        lambda graph: graph.finish("waiting"),
        lambda graph: graph.produce("ready", "y"),
        lambda graph: graph.finish("ready"),
        lambda graph: graph.finish("ready, no outputs"),
        lambda graph: graph.start("running"),
    ],
)
def test_an_illegal_transition_raises_and_changes_nothing(event: Callable[[RequestGraph], object]) -> None:
    graph = RequestGraph()
    graph.add("waiting", ["never"], ["x"])
    graph.add("ready", [], ["y"])
    graph.add("ready, no outputs", [], [])
    graph.add("running", [], ["z"])
    graph.start("running")
    refused(graph, lambda: event(graph), GraphTransitionError)


def test_what_is_not_there_is_unknown() -> None:
    graph = RequestGraph()
    for event in (graph.start, graph.finish, graph.cancel, graph.view.rank, graph.view.unset_outputs):
        refused(graph, partial(event, "nobody"), UnknownCallError)
    refused(graph, lambda: graph.view.users("nothing"), UnknownVariableError)
    assert graph.view.call_state("nobody") is None
    assert graph.view.variable_state("nothing") is None
    assert graph.view.cause("nothing") is None


def test_the_tables_lead_from_the_first_state_to_every_other_and_never_out_of_the_last() -> None:
    def reached(first: str, table: object) -> set[str]:
        assert isinstance(table, dict)
        found, new = {first}, {first}
        while new:
            new = {after for (before, _), after in table.items() if before in new} - found
            found |= new
        return found

    assert reached(CallState.WAITING, CALL_TRANSITIONS) == set(CallState)
    assert reached(VariableState.EMPTY, VARIABLE_TRANSITIONS) == set(VariableState)
    last = {CallState.FINISHED, CallState.FAILED, CallState.CANCELLED}
    assert not last & {before for before, _ in CALL_TRANSITIONS}
    assert not {VariableState.SET, VariableState.FAILED} & {before for before, _ in VARIABLE_TRANSITIONS}


# Size


def chain(length: int) -> list[tuple[str, list[str], list[str]]]:
    return [(f"c{i}", [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]


def map_reduce(maps: int) -> list[tuple[str, list[str], list[str]]]:
    """A prepared document, a map over it, a reduce, and a chain behind that."""
    parts = [(f"map {i}", ["document"], [f"part {i}"]) for i in range(maps)]
    reduce = ("reduce", [f"part {i}" for i in range(maps)], ["v0"])
    return [("prepare", [], ["document"]), reduce, *chain(20), *parts]


def test_a_call_that_comes_between_two_others_gets_a_rank_between_theirs() -> None:
    graph = RequestGraph()
    graph.add("first", [], ["x"])
    graph.add("other", [], ["y"])
    graph.add("last", ["y", "z"], ["end"])
    graph.add("behind", ["end"], [])
    graph.add("between", ["x"], ["z"])
    ranks = [graph.view.rank(call_id) for call_id in ("first", "between", "last", "behind")]
    assert all(rank < above for rank, above in pairwise(ranks))
    graph.check()


@pytest.mark.parametrize(
    ("calls", "walks"),
    [(chain(300), 0), (chain(300)[::-1], 0), (map_reduce(300), 1), (map_reduce(300)[::-1], 1)],
    ids=["chain", "chain backwards", "maps last", "maps first"],
)
def test_arrivals_in_an_order_that_applications_have_are_not_searched(
    calls: list[tuple[str, list[str], list[str]]], walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = Mock(side_effect=request_graph_node._raise_ranks)
    monkeypatch.setattr(request_graph_node, "_raise_ranks", walk)
    graph = RequestGraph()
    for call in calls:
        graph.add(*call)
    graph.check()
    assert walk.call_count == walks


def test_a_long_chain_in_any_order_runs_and_fails_without_recursion() -> None:
    calls = chain(5_000)
    Random(1).shuffle(calls)
    graph = RequestGraph()
    for call in calls:
        graph.add(*call)
    assert graph.set_value("v0").ready == ("c0",)
    assert run(graph, "c0", "v1")[1].ready == ("c1",)
    effects = graph.fail("c1", "no engine")
    assert len(effects.ended) == 4_999
    last = effects.ended[-1].cause
    assert last is not None
    assert len(list(last)) == last.length == 4_999
    assert [cause.where for cause in last.furthest] == ["c5", "c4", "c3", "c2", "c1"]
    assert last.root.what == "no engine"
    assert repr(last) == "Cause('its input v4999 failed', 'c4999', ...)"
    assert graph.view.waiting_calls == 0


# Against the model

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
        graph.check()


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
            Failed(name, cause) for name, cause in effects.variables_failed if self.graph.view.cause(name) is cause
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
        graph.check()
        for name in VARIABLES:
            assert graph.view.variable_state(name) == model.variable_state(name)
            assert graph.view.producer(name) == model.owner.get(name)
        for call_id in CALLS:
            assert graph.view.call_state(call_id) == model.call_state(call_id)
            assert (call_id in graph.view) == (call_id in model.live)
        counts = (graph.view.waiting_calls, graph.view.ready_calls, graph.view.running_calls)
        states = (CallState.WAITING, CallState.READY, CallState.RUNNING)
        assert counts == tuple(len(model.in_state(state)) for state in states)
        assert graph.view.variables == sum(model.variable_state(name) is not None for name in VARIABLES)
        assert Counter(self.links(graph)) == model.links()
        assert Counter((a, b) for a in model.live for b in graph.view.consumers(a)) == model.links()
        assert all(graph.view.rank(producer) < graph.view.rank(consumer) for producer, consumer in self.links(graph))

    def links(self, graph: RequestGraph) -> Iterator[tuple[str, str]]:
        return ((producer, call_id) for call_id in self.model.live for producer in graph.view.producers(call_id))


TestSession = Session.TestCase
