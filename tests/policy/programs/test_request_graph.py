"""The request graph by its stories."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from plait.policy.programs.request_graph import CLIENT, RequestGraph
from plait.policy.programs.request_graph_state import (
    CALL_TRANSITIONS,
    NO_EFFECTS,
    VARIABLE_TRANSITIONS,
    CallState,
    CycleError,
    DoubleProducerError,
    Effects,
    Ended,
    GraphError,
    GraphTransitionError,
    Link,
    VariableState,
)
from tests.invariants import check
from tests.policy.programs.graph_events import refused, run, trail, unset


def test_a_call_is_ready_when_its_last_input_has_a_value() -> None:
    graph = RequestGraph()
    assert graph.add("code", ["task"], ["program"]).ready == ()
    assert graph.add("test", ["task", "program"], ["report"]).linked == (Link("code", "test"),)
    assert graph.set_value("task") == Effects(ready=("code",), variable_set="task")
    assert graph.start("code") == NO_EFFECTS
    assert graph.produce("code", "program") == Effects(
        ready=("test",),
        variable_set="program",
        ended=(Ended("code", CallState.FINISHED, None),),
        cut=(Link("code", "test"),),
    )
    assert graph.counts == {CallState.WAITING: 0, CallState.READY: 1, CallState.RUNNING: 0}
    assert len(graph.variables) == 3
    assert "code" not in graph
    assert graph.variable_state("program") is VariableState.SET, "the call is gone, its output is not"
    assert graph.producer("program") == "code"
    check(graph)


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
    assert unset(graph, "two") == ("y",)
    assert graph.produce("two", "y").ready == ("of y",)
    refused(graph, lambda: graph.produce("two", "y"), GraphError, "no call")


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
    cause = graph.cause("w")
    assert cause is effects.variables_failed[-1].cause
    assert cause is not None
    assert cause.root.where == "a"
    assert str(cause) == (
        "c: its input y failed, because b: its input x failed, because a: the engine stopped answering"
    )
    assert graph.call_state("other") is CallState.WAITING
    check(graph)


def test_what_was_produced_before_the_failure_keeps_its_value() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x", "y"])
    graph.add("b", ["x", "y"], [])
    graph.add("c", ["x"], [])
    graph.start("a")
    graph.produce("a", "x")
    effects = graph.fail("a", "preempted for good")
    assert [ended.call_id for ended in effects.ended] == ["a", "b"]
    assert graph.variable_state("x") is VariableState.SET
    assert graph.call_state("c") is CallState.READY


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
    assert graph.variable_state("y") is graph.variable_state("w") is VariableState.FAILED
    check(graph)


def test_a_cancelled_call_is_cancelled_and_its_consumers_fail() -> None:
    graph = RequestGraph()
    graph.add("a", ["never"], ["x"])
    graph.add("b", ["x"], [])
    assert [(ended.call_id, ended.state) for ended in graph.cancel("a", "the client left").ended] == [
        ("a", CallState.CANCELLED),
        ("b", CallState.FAILED),
    ]
    assert graph.variable_state("never") is None, "nobody names it any more"


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
    refused(graph, lambda: graph.add("a", [], ["y"]), GraphError, "is in the graph already")
    run(graph, "a", "x")
    refused(graph, lambda: graph.finish("a"), GraphError, "no call")
    graph.add("a", [], ["y"])
    assert graph.users("x") == (), "that was another call"
    graph.forget("x")
    check(graph)


def test_what_is_forgotten_can_be_produced_again() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x"])
    refused(graph, lambda: graph.forget("x"), GraphError, "cannot be forgotten")
    graph.fail("a", "no engine")
    graph.forget("x")
    refused(graph, lambda: graph.forget("x"), GraphError, "no variable")
    graph.add("again", [], ["x"])
    graph.add("b", ["x"], [])
    run(graph, "again", "x")
    error = refused(graph, lambda: graph.forget("x"), GraphError, "cannot be forgotten")
    assert str(error).endswith(": 'b'")
    run(graph, "b")
    graph.forget("x")
    assert not graph.variables
    assert repr(graph) == "RequestGraph(variables=0, )"


def test_a_running_producer_keeps_its_outputs_from_being_forgotten() -> None:
    graph = RequestGraph()
    graph.add("a", [], ["x", "y"])
    graph.start("a")
    graph.produce("a", "x")
    assert graph.users("x") == ("a",)
    refused(graph, lambda: graph.forget("x"), GraphError, "cannot be forgotten")


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
    for event in (graph.start, graph.finish, graph.cancel, graph.call, graph.consumers):
        refused(graph, partial(event, "nobody"), GraphError, "no call")
    refused(graph, lambda: graph.users("nothing"), GraphError, "no variable")
    assert graph.call_state("nobody") is None
    assert graph.variable_state("nothing") is None
    assert graph.cause("nothing") is None


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
