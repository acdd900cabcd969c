"""Deduced objectives of the paper's applications, and as calls and gets come and go."""

from __future__ import annotations

import pytest

from plait.policy.programs.needs import Stage
from plait.policy.programs.objectives import NOTHING, Deduction
from plait.policy.programs.request_graph_state import GraphError
from plait.policy.types import Objective
from tests.invariants import check
from tests.policy.programs.application import MAP_REDUCE, Application

LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT


# The applications of the paper


def test_throughput_marks_every_call_upstream() -> None:
    app = Application(*MAP_REDUCE, "beside:d->other")
    assert set(app.deductions.get("sum", THROUGHPUT)) == {"map 1", "map 2", "reduce"}
    assert app.stages() == {
        **dict.fromkeys(("map 1", "map 2", "reduce"), (THROUGHPUT, None)),
        **dict.fromkeys(("polish", "beside"), (None, None)),
    }


def test_latency_makes_stages_of_one_call_latency_calls_and_larger_ones_task_groups() -> None:
    app = Application(*MAP_REDUCE, "beside:d->other")
    assert set(app.deductions.get("end", LATENCY)) == {"map 1", "map 2", "reduce", "polish"}
    assert app.stages() == {
        "map 1": ("group", 2),
        "map 2": ("group", 2),
        "reduce": (LATENCY, 1),
        "polish": (LATENCY, 0),
        "beside": (None, None),
    }
    group = app.deductions.of("map 1").group
    assert group == app.deductions.of("map 2").group == Stage("polish", 2)
    assert group is not None
    assert app.deductions.members(group) == ("map 1", "map 2")


def test_a_chain_is_latency_sensitive_all_the_way_up() -> None:
    app = Application("a:->x", "b:x->y", "c:y->z", "d:z->w")
    app.deductions.get("w", LATENCY)
    assert app.stages() == {name: (LATENCY, stage) for stage, name in enumerate("dcba")}


def test_figure_9_two_awaited_variables_their_common_predecessor_and_two_task_groups() -> None:
    app = Application(
        *("1:v3->v1", "2:v3->v2", "3:m1 m2->v3"),
        *("4:n1 n2->m1", "5:n1 n2->m2", "6:->n1", "7:->n2"),
    )
    app.deductions.get("v1", LATENCY)
    app.deductions.get("v2", LATENCY)
    assert app.stages() == {
        **dict.fromkeys("12", (LATENCY, 0)),
        "3": (LATENCY, 1),
        **dict.fromkeys("45", ("group", 2)),
        **dict.fromkeys("67", ("group", 3)),
    }
    assert app.deductions.of("4").group == Stage("1", 2), "of equally near ones, the call with the smaller id"


def test_a_stage_is_the_longest_distance() -> None:
    app = Application("a:->x", "b:x->y", "c:x y->z")
    app.deductions.get("z", LATENCY)
    assert app.stages() == {"a": (LATENCY, 2), "b": (LATENCY, 1), "c": (LATENCY, 0)}


# Wishes that differ


def test_latency_wins_over_throughput_for_a_call_that_serves_both() -> None:
    app = Application("a:->x", "b:x->y", "c:x->z")
    app.deductions.get("y", THROUGHPUT)
    assert app.deductions.get("z", LATENCY) == ("c", "a")
    assert app.stages() == {"a": (LATENCY, 1), "b": (THROUGHPUT, None), "c": (LATENCY, 0)}
    assert app.deductions.release("z", LATENCY) == ("c", "a")
    assert app.stages() == {"a": (THROUGHPUT, None), "b": (THROUGHPUT, None), "c": (None, None)}


def test_of_several_awaited_variables_the_nearest_one_counts() -> None:
    app = Application("a:->x", "b:x->y", "c:y->z", "near:x->n", "other:->o", "c2:o->p", "c3:p y->q")
    app.deductions.get("z", LATENCY)
    app.deductions.get("n", LATENCY)
    assert app.stages()["a"] == (LATENCY, 1)
    app.deductions.release("n", LATENCY)
    assert app.stages()["a"] == (LATENCY, 2)
    app.deductions.get("q", LATENCY)
    assert app.stages()["b"] == (LATENCY, 1), "next to c as well as to c3, and the only one next to c"
    assert app.stages()["other"] == (LATENCY, 2)


def test_a_calls_own_annotation_wins_and_deduces_for_those_upstream() -> None:
    app = Application(*MAP_REDUCE)
    assert set(app.deductions.annotate("reduce", LATENCY)) == {"reduce", "map 1", "map 2"}
    assert app.stages()["reduce"] == (LATENCY, 0)
    assert app.stages()["map 1"] == ("group", 1)
    app.deductions.get("end", THROUGHPUT)
    assert app.stages()["reduce"] == (LATENCY, 0)
    app.deductions.annotate("map 1", THROUGHPUT)
    assert app.stages()["map 1"] == (THROUGHPUT, None)
    assert app.stages()["map 2"] == (LATENCY, 1), "a call that wants throughput is in no group"
    assert set(app.deductions.annotate("map 1", None)) == {"map 1", "map 2"}
    assert app.stages()["map 2"] == ("group", 1)


def test_what_is_upstream_of_a_throughput_call_on_the_way_to_an_awaited_variable_is_awaited_too() -> None:
    app = Application("a:->x", "b:x->y", "c:y->z")
    app.deductions.get("z", LATENCY)
    app.deductions.annotate("b", THROUGHPUT)
    assert app.stages() == {"a": (LATENCY, 2), "b": (THROUGHPUT, None), "c": (LATENCY, 0)}


# Native steps


def test_a_native_step_does_not_count_on_the_way_to_an_awaited_variable() -> None:
    app = Application("a:->x", "*parse:x->p", "*count:p->n", "b:n->y", "c:x->z", "d:y z->end")
    app.deductions.get("end", LATENCY)
    assert app.stages() == {
        "a": (LATENCY, 2), "*parse": (None, None), "*count": (None, None), "b": ("group", 1), "c": ("group", 1),
        "d": (LATENCY, 0),
    }  # fmt: skip
    check(app.deductions)


def test_calls_that_feed_one_native_step_are_a_group() -> None:
    app = Application("map 1:->p1", "map 2:->p2", "*join:p1 p2->all")
    app.deductions.get("all", LATENCY)
    assert app.stages() == {"map 1": ("group", 0), "map 2": ("group", 0), "*join": (None, None)}
    app.deductions.release("all", LATENCY)
    app.add("reduce:all->sum")
    app.deductions.get("sum", LATENCY)
    assert app.stages() == {"map 1": ("group", 1), "map 2": ("group", 1), "*join": (None, None), "reduce": (LATENCY, 0)}
    app.deductions.get("sum", THROUGHPUT)
    app.deductions.release("sum", LATENCY)
    assert app.stages()["map 1"] == (THROUGHPUT, None)
    assert app.deductions.of("*join") == NOTHING


def test_calls_that_only_a_native_step_takes_from_are_of_the_sessions_last_stage() -> None:
    app = Application("a:->x", "b:->y", "*parse:x->p")
    app.deductions.prefer(LATENCY, ["a", "b", "*parse"])
    assert app.deductions.of("a") == app.deductions.of("b")
    assert app.deductions.of("a").is_guess
    app.add("c:p->z")
    assert app.deductions.of("a") == Deduction(LATENCY, 1)


# Changes


def test_calls_may_come_after_the_get_and_say_whose_deduction_changes() -> None:
    app = Application()
    assert app.deductions.get("end", LATENCY) == ()
    assert app.add("reduce:p1 p2 p3->end") == ("reduce",)
    assert app.add("map 1:->p1") == ("map 1",)
    assert app.deductions.of("map 1") == Deduction(LATENCY, 1, None)
    assert set(app.add("map 2:->p2")) == {"map 1", "map 2"}, "now they are two"
    assert app.add("map 3:->p3") == ("map 3",)
    assert app.deductions.of("map 1") == Deduction(LATENCY, 1, Stage("reduce", 1))
    assert set(app.add("follow:end->more")) == set()


def test_who_is_left_of_a_group_is_a_latency_call() -> None:
    app = Application("map 1:->p1", "map 2:->p2", "map 3:->p3", "reduce:p1 p2 p3->end")
    app.deductions.get("end", LATENCY)
    assert app.run("map 2") == []
    assert app.run("map 1") == ["map 3"]
    assert app.deductions.of("map 3") == Deduction(LATENCY, 1, None)


def test_an_answered_get_is_over() -> None:
    app = Application("a:->x y", "b:x->z")
    app.deductions.get("x", LATENCY)
    app.graph.start("a")
    assert app.deductions.apply(app.graph.produce("a", "x")) == ("a",)
    assert app.deductions.of("a") == NOTHING
    assert app.deductions.get("x", LATENCY) == ()
    assert app.deductions.release("x", LATENCY) == ()
    assert app.deductions.asked("a") is None


def test_a_failure_ends_what_was_deduced_for_those_who_served_the_failed() -> None:
    app = Application(*MAP_REDUCE)
    app.deductions.get("end", LATENCY)
    assert app.deductions.apply(app.graph.fail("map 1", "no engine")) == ("map 2",)
    assert app.deductions.of("map 2") == NOTHING
    with pytest.raises(GraphError, match="no call"):
        app.deductions.of("reduce")
    with pytest.raises(GraphError, match="no call"):
        app.deductions.annotate("reduce", LATENCY)
    check(app.deductions)


def test_a_wide_stage_changes_in_company_only() -> None:
    app = Application("split:->d", "reduce:" + " ".join(f"p{i}" for i in range(200)) + "->end")
    app.deductions.get("end", LATENCY)
    changes = [app.add(f"m{i}:d->p{i}") for i in range(200)]
    assert [len(changed) for changed in changes] == [2, 2, *[1] * 198]
    assert app.deductions.of("split") == Deduction(LATENCY, 2, None)
    check(app.deductions)
