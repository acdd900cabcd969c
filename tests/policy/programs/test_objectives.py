"""Deduced objectives: the applications of the paper, and random graphs against a deduction made anew each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.programs.objectives import NOTHING, Deduction, Deductions
from plait.policy.programs.objectives_marks import Mark
from plait.policy.programs.objectives_offers import Need, Offers
from plait.policy.programs.objectives_slo import GROUP_STRETCH, LATENCY_SLO, slo_of
from plait.policy.programs.objectives_stage import Stage
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_effects import Effects
from plait.policy.programs.request_graph_state import GraphError, UnknownCallError
from plait.policy.types import Objective, Slo

LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT


class Application:
    """A graph and its deductions; calls are written `name: inputs -> outputs`."""

    def __init__(self, *calls: str) -> None:
        self.graph = RequestGraph()
        self.deductions = Deductions(self.graph.view, lambda _call_id: 1.0)
        for call in calls:
            self.add(call)

    def add(self, call: str) -> tuple[str, ...]:
        name, _, links = call.partition(":")
        inputs, _, outputs = links.partition("->")
        return self.deductions.apply(self.graph.add(name, inputs.split(), outputs.split()))

    def run(self, name: str) -> list[str]:
        """The calls whose deductions change while a ready call runs from start to end."""
        graph, apply = self.graph, self.deductions.apply
        changed = [*apply(graph.start(name))]
        for output in graph.view.unset_outputs(name):
            changed += apply(graph.produce(name, output))
        return [*changed, *apply(graph.finish(name))]

    def stages(self) -> dict[str, tuple[str | None, int | None]]:
        """The objective in a word, and the stage, of every call."""
        words = {}
        for name in self.graph._store.calls:
            deduction = self.deductions.of(name)
            words[name] = ("group" if deduction.group else deduction.objective, deduction.stage)
        return words


MAP_REDUCE = ("map 1:d ->p1", "map 2:d->p2", "reduce:p1 p2->sum", "polish:sum->end")


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
    assert app.run("map 2") == ["map 2"]
    assert app.run("map 1") == ["map 1", "map 3"]
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
    with pytest.raises(UnknownCallError):
        app.deductions.of("reduce")
    with pytest.raises(UnknownCallError):
        app.deductions.annotate("reduce", LATENCY)
    app.deductions.check()


def test_a_wide_stage_changes_in_company_only() -> None:
    app = Application("split:->d", "reduce:" + " ".join(f"p{i}" for i in range(200)) + "->end")
    app.deductions.get("end", LATENCY)
    changes = [app.add(f"m{i}:d->p{i}") for i in range(200)]
    assert [len(changed) for changed in changes] == [2, 2, *[1] * 198]
    assert app.deductions.of("split") == Deduction(LATENCY, 2, None)
    app.deductions.check()


# Against a deduction made anew

VARIABLES = [f"v{number}" for number in range(9)]
MARKS: list[Mark] = [LATENCY, LATENCY, THROUGHPUT, Slo(jct_s=9.0)]


@dataclass
class Model:
    """The calls that have not ended and what is still open of them, the marks, and no other state."""

    calls: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    marks: list[tuple[str, Mark]] = field(default_factory=list)
    own: dict[str, Objective] = field(default_factory=dict)

    def consumers(self, call_id: str) -> list[str]:
        outputs = set(self.calls[call_id][1])
        return [other for other, (inputs, _) in self.calls.items() if outputs & set(inputs)]

    def marked(self, call_id: str) -> list[Mark | None]:
        return [mark for name, mark in self.marks if name in self.calls[call_id][1]] + [self.own.get(call_id)]

    def downstream(self, call_id: str) -> set[str]:
        return {call_id}.union(*(self.downstream(consumer) for consumer in self.consumers(call_id)))

    def deductions(self) -> dict[str, Deduction]:
        """Every call's, from the definition and by going through all there is."""
        latency = {c for c in self.calls if any(mark is LATENCY or isinstance(mark, Slo) for mark in self.marked(c))}

        @cache
        def stage(call_id: str) -> tuple[int, str] | None:
            if call_id in latency:
                return 0, call_id
            near = [found for consumer in self.consumers(call_id) if (found := stage(consumer))]
            farthest = {awaited: max(far for far, other in near if other == awaited) for _, awaited in near}
            return min(((far + 1, awaited) for awaited, far in farthest.items()), default=None)

        size = Counter(stage(c) for c in self.calls if self.own.get(c) is not THROUGHPUT)
        found = {}
        for call_id in self.calls:
            at = stage(call_id)
            if at is not None and self.own.get(call_id) is not THROUGHPUT:
                group = Stage(at[1], at[0]) if size[at] > 1 else None
                found[call_id] = Deduction(LATENCY, at[0], group)
            elif any(THROUGHPUT in self.marked(other) for other in self.downstream(call_id)):
                found[call_id] = Deduction(THROUGHPUT)
            else:
                found[call_id] = NOTHING
        return found


class Tracked:
    """A graph and its deductions beside the model: after every event they agree, and so does what is said to change."""

    def __init__(self) -> None:
        self.graph = RequestGraph()
        self.deductions = Deductions(self.graph.view, lambda _call_id: 1.0)
        self.model = Model()
        self.before: dict[str, Deduction] = {}

    def changed(self, call_ids: tuple[str, ...]) -> None:
        expected = self.model.deductions()
        assert {call_id: self.deductions.of(call_id) for call_id in self.model.calls} == expected
        assert len(set(call_ids)) == len(call_ids)
        assert set(call_ids) == {c for c in expected if expected[c] != self.before.get(c, NOTHING)}
        for deduction in expected.values():
            if deduction.group is not None:
                mine = {call_id for call_id in expected if expected[call_id].group == deduction.group}
                assert set(self.deductions.members(deduction.group)) == mine
        self.before = expected
        self.graph.check()
        self.deductions.check()

    def happened(self, effects: Effects) -> None:
        model = self.model
        if effects.added is not None and effects.added in self.graph.view:
            call_id = effects.added
            inputs = [variable.name for variable in self.graph._store.calls[call_id].inputs]
            model.calls[call_id] = (inputs, list(self.graph.view.unset_outputs(call_id)))
        done = {effects.variable_set, *(name for name, _ in effects.variables_failed)}
        model.marks = [(name, mark) for name, mark in model.marks if name not in done]
        for _, outputs in model.calls.values():
            outputs[:] = [name for name in outputs if name not in done]
        for ended in effects.ended:
            model.calls.pop(ended.call_id, None)
            model.own.pop(ended.call_id, None)
        self.changed(self.deductions.apply(effects))

    def get(self, name: str, mark: Mark) -> None:
        if self.graph.view.variable_state(name) not in {"set", "failed"}:
            self.model.marks.append((name, mark))
        self.changed(self.deductions.get(name, mark))

    def release(self, name: str, mark: Mark) -> None:
        if (name, mark) in self.model.marks:
            self.model.marks.remove((name, mark))
        self.changed(self.deductions.release(name, mark))

    def annotate(self, call_id: str, objective: Objective | None) -> None:
        self.model.own.pop(call_id, None)
        if objective is not None:
            self.model.own[call_id] = objective
        self.changed(self.deductions.annotate(call_id, objective))


def step(tracked: Tracked, random: Random, number: int) -> None:
    """One random event."""
    graph, calls = tracked.graph, list(tracked.model.calls)
    name = random.choice(VARIABLES)
    kind = random.choice(["add"] * 6 + ["get"] * 3 + ["own", "release", "set", "forget", "break"] + ["run"] * 3)
    try:
        if kind == "add":
            inputs = random.choices(VARIABLES, k=random.randrange(4))
            free = [name for name in VARIABLES if graph.view.producer(name) is None]
            outputs = random.sample(free, min(len(free), random.choice([1, 1, 2])))
            tracked.happened(graph.add(f"c{number}", inputs, outputs))
        elif kind == "get":
            tracked.get(name, random.choice(MARKS))
        elif kind == "release":
            tracked.release(*random.choice(tracked.model.marks or [(name, LATENCY)]))
        elif kind == "set":
            tracked.happened(graph.set_value(name))
        elif kind == "forget":
            graph.forget(name)
        elif calls and kind == "own":
            tracked.annotate(random.choice(calls), random.choice([LATENCY, THROUGHPUT, None]))
        elif calls and kind == "break":
            tracked.happened(graph.cancel(random.choice(calls)))
        elif calls:
            run(tracked, random.choice(calls))
    except GraphError:
        pass  # refused: what that leaves behind is tested with the graph


def run(tracked: Tracked, call_id: str) -> None:
    graph = tracked.graph
    if graph.view.call_state(call_id) == "ready":
        tracked.happened(graph.start(call_id))
    elif graph.view.unset_outputs(call_id):
        tracked.happened(graph.produce(call_id, graph.view.unset_outputs(call_id)[0]))
    else:
        tracked.happened(graph.finish(call_id))


@given(seed=st.integers(0, 2**32))
def test_after_every_event_the_deduction_is_what_it_would_be_made_anew(seed: int) -> None:
    tracked, random = Tracked(), Random(seed)
    for number in range(60):
        step(tracked, random, number)


def random_dag(random: Random, calls: int) -> list[tuple[str, list[str], list[str]]]:
    """Calls in topological order, each producing one variable or two of its own."""
    found: list[tuple[str, list[str], list[str]]] = []
    names: list[str] = []
    for number in range(calls):
        inputs = random.sample(names, min(len(names), random.randrange(4)))
        outputs = [f"o{number}", f"p{number}"][: random.choice([1, 1, 2])]
        found.append((f"c{number}", inputs, outputs))
        names += outputs
    return found


@given(seed=st.integers(0, 2**32), calls=st.integers(1, 9), completed=st.integers(0, 3))
def test_the_deduction_does_not_depend_on_the_order_of_arrival(seed: int, calls: int, completed: int) -> None:
    random = Random(seed)
    dag = random_dag(random, calls)
    marks = [(random.choice(random.choice(dag)[2]), random.choice(MARKS)) for _ in range(random.randrange(4))]
    own = {random.choice(dag)[0]: random.choice([LATENCY, THROUGHPUT]) for _ in range(random.randrange(3))}
    results = []
    for _ in range(3):
        tracked = Tracked()
        events = [partial(tracked.get, *mark) for mark in marks]
        events += [partial(arrive, tracked, call, own, dag[:completed]) for call in dag]
        random.shuffle(events)
        for event in events:
            event()
        assert not tracked.model.calls.keys() & {call[0] for call in dag[:completed]}
        results.append(tracked.before)
    assert results[0] == results[1] == results[2]


def arrive(
    tracked: Tracked,
    call: tuple[str, list[str], list[str]],
    own: dict[str, Objective],
    to_complete: list[tuple[str, list[str], list[str]]],
) -> None:
    """Add a call with its annotation, then run what is to be completed as far as that goes."""
    tracked.happened(tracked.graph.add(*call))
    if call[0] in own:
        tracked.annotate(call[0], own[call[0]])
    for call_id, _, _ in to_complete:
        while tracked.graph.view.call_state(call_id) in {"ready", "running"}:
            run(tracked, call_id)


@given(seed=st.integers(0, 2**32))
def test_a_call_is_needed_for_the_nearest_of_what_its_consumers_are_needed_for(seed: int) -> None:
    random, offers, needs = Random(seed), Offers(), list[Need]()
    for _ in range(200):
        if needs and random.random() < 0.45:
            offers.change(gone := random.choice(needs), -1)
            needs.remove(gone)
        else:
            stage = Stage(random.choice("abcde"), random.randrange(6))
            needs.append(stage if random.random() < 0.7 else Objective.THROUGHPUT)
            offers.change(needs[-1], 1)
        farthest = {need.awaited: need.distance for need in sorted(need for need in needs if isinstance(need, Stage))}
        nearest = min(((distance + 1, awaited) for awaited, distance in farthest.items()), default=None)
        if random.random() < 0.5:
            other = THROUGHPUT if needs else None
            assert offers.need() == (other if nearest is None else Stage(nearest[1], nearest[0]))
        assert offers.counted() == Counter(needs)
        assert bool(offers) == bool(needs)
    assert len(offers._heap) <= 2 * 5 + 8 + 5, "what is outdated does not pile up"


def paths(graph: RequestGraph, call_id: str) -> Iterator[list[str]]:
    """Every way from a call without producers to this one."""
    producers = set(graph.view.producers(call_id))
    if not producers:
        yield [call_id]
    for producer in producers:
        yield from ([*path, call_id] for path in paths(graph, producer))


@given(seed=st.integers(0, 2**32), calls=st.integers(1, 9))
def test_with_one_awaited_variable_a_stage_is_the_longest_of_all_paths(seed: int, calls: int) -> None:
    app = Application()
    for call in random_dag(Random(seed), calls):
        app.deductions.apply(app.graph.add(*call))
    app.deductions.get(f"o{calls - 1}", LATENCY)
    found = list(paths(app.graph, f"c{calls - 1}"))
    for number in range(calls):
        call_id = f"c{number}"
        distances = [len(path) - 1 - path.index(call_id) for path in found if call_id in path]
        assert app.deductions.of(call_id).stage == max(distances, default=None)


# SLO fields


def test_a_deduced_objective_becomes_slo_fields() -> None:
    group = Deduction(LATENCY, 1, Stage("c", 1))
    assert slo_of(Deduction(LATENCY, 0), 3.0) == LATENCY_SLO
    assert slo_of(Deduction(LATENCY, 0), 3.0, latency=Slo(ttft_s=2.0)) == Slo(ttft_s=2.0)
    assert slo_of(group, 3.0) == Slo(jct_s=3.0 * GROUP_STRETCH)
    assert slo_of(Deduction(THROUGHPUT), 3.0, share_s=1.0) is None
    assert slo_of(NOTHING, 3.0) is None


def test_what_is_explicit_wins_over_what_is_deduced() -> None:
    group = Deduction(LATENCY, 1, Stage("c", 1))
    own, asked = Slo(tpot_s=0.1), Slo(ttft_s=0.5, jct_s=60.0)
    assert slo_of(group, 3.0, own=own, asked=asked, share_s=4.0) == own
    assert slo_of(NOTHING, 3.0, own=own) == slo_of(Deduction(THROUGHPUT), 3.0, own=own) == own
    assert slo_of(group, 3.0, own=Slo()) == slo_of(group, 3.0), "nothing was said"
    assert slo_of(group, 3.0, share_s=4.0) == Slo(jct_s=4.0)
    assert slo_of(Deduction(LATENCY, 0), 3.0, asked=asked, share_s=4.0) == Slo(ttft_s=0.5, jct_s=4.0)
    assert slo_of(Deduction(LATENCY, 0), 3.0, asked=asked) == Slo(ttft_s=0.5), "60 s are not this call's"


def test_a_job_that_is_late_already_is_treated_as_one_without_a_deadline() -> None:
    assert slo_of(Deduction(LATENCY, 1, Stage("c", 1)), 3.0, share_s=0.0) == Slo(jct_s=3.0 * GROUP_STRETCH)
    assert slo_of(Deduction(LATENCY, 1), 3.0, share_s=-1.0) == LATENCY_SLO


def test_gets_with_figures_ask_for_the_tightest_of_each() -> None:
    app = Application("a:->x y", "b:x->z")
    for name, slo in (("x", Slo(ttft_s=1.0, tpot_s=0.1)), ("y", Slo(ttft_s=2.0, jct_s=9.0)), ("x", Slo(jct_s=8.0))):
        app.deductions.get(name, slo)
    app.deductions.get("y", LATENCY)
    assert app.deductions.asked("a") == Slo(ttft_s=1.0, tpot_s=0.1, jct_s=8.0)
    assert app.deductions.asked("b") is None
    assert app.deductions.of("a") == Deduction(LATENCY, 0)
