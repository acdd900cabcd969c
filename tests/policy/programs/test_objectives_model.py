"""Deduction against one that is made anew after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.programs.needs import Mark, Need, Offers, Stage
from plait.policy.programs.objectives import NOTHING, Deduction, Deductions
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import Effects, GraphError
from plait.policy.types import Objective, Slo
from tests.invariants import check, counted
from tests.policy.programs.application import Application
from tests.policy.programs.graph_events import unset

LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT


VARIABLES = [f"v{number}" for number in range(9)]
MARKS: list[Mark] = [LATENCY, LATENCY, THROUGHPUT, Slo(jct_s=9.0)]


@dataclass
class Model:
    """The calls that have not ended and what is still open of them, the marks, and no other state."""

    calls: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    marks: list[tuple[str, Mark]] = field(default_factory=list)
    own: dict[str, Objective] = field(default_factory=dict)
    natives: set[str] = field(default_factory=set)
    of_session: Objective | None = None

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
        def calls_from(call_id: str) -> tuple[int, str] | None:
            """How many calls there are from this one, itself included, to what is awaited; a native step is no call."""
            own = int(call_id not in self.natives)
            if call_id in latency:
                return own, call_id
            if self.of_session is LATENCY and not self.consumers(call_id) and THROUGHPUT not in self.marked(call_id):
                return own, ""
            near = [found for consumer in self.consumers(call_id) if (found := calls_from(consumer))]
            farthest = {awaited: max(far for far, other in near if other == awaited) for _, awaited in near}
            return min(((far + own, awaited) for awaited, far in farthest.items()), default=None)

        def stage(call_id: str) -> tuple[int, str] | None:
            counted = calls_from(call_id)
            return None if counted is None else (counted[0] - 1, counted[1])

        run = self.calls.keys() - self.natives
        size = Counter(stage(c) for c in run if self.own.get(c) is not THROUGHPUT)
        found = dict.fromkeys(self.calls, NOTHING)
        for call_id in run:
            at = stage(call_id)
            if at is not None and self.own.get(call_id) is not THROUGHPUT:
                group = Stage(at[1], at[0]) if size[at] > 1 else None
                found[call_id] = Deduction(LATENCY, at[0], group, at == (0, ""))
            elif THROUGHPUT in {self.of_session, *(mark for c in self.downstream(call_id) for mark in self.marked(c))}:
                found[call_id] = Deduction(THROUGHPUT)
        return found


class Tracked:
    """A graph and its deductions beside the model: after every event they agree, and so does what is said to change."""

    def __init__(self) -> None:
        self.graph = RequestGraph()
        self.deductions = Deductions(self.graph)
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
        check(self.graph)
        check(self.deductions)

    def happened(self, effects: Effects) -> None:
        model = self.model
        if effects.added is not None and effects.added in self.graph:
            call_id = effects.added
            inputs = [variable.name for variable in self.graph.calls[call_id].inputs]
            model.calls[call_id] = (inputs, list(unset(self.graph, call_id)))
            if self.graph.call(call_id).is_native:
                model.natives.add(call_id)
        done = {effects.variable_set, *(name for name, _ in effects.variables_failed)}
        model.marks = [(name, mark) for name, mark in model.marks if name not in done]
        for _, outputs in model.calls.values():
            outputs[:] = [name for name in outputs if name not in done]
        for ended in effects.ended:
            model.calls.pop(ended.call_id, None)
            model.own.pop(ended.call_id, None)
            model.natives.discard(ended.call_id)
        self.changed(self.deductions.apply(effects))

    def get(self, name: str, mark: Mark) -> None:
        if self.graph.variable_state(name) not in {"set", "failed"}:
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

    def prefer(self, objective: Objective | None) -> None:
        self.model.of_session = objective
        self.changed(self.deductions.prefer(objective, tuple(self.model.calls)))


def step(tracked: Tracked, random: Random, number: int) -> None:
    """One random event."""
    graph, calls = tracked.graph, tracked.model.calls.keys()
    name = random.choice(VARIABLES)
    kind = random.choice(["add"] * 6 + ["get"] * 3 + ["own", "release", "set", "forget", "break"] + ["run"] * 3)
    try:
        if kind == "add":
            inputs = random.choices(VARIABLES, k=random.randrange(4))
            free = [name for name in VARIABLES if graph.producer(name) is None]
            is_native = random.random() < 0.25
            outputs = random.sample(free, min(len(free), 1 if is_native else random.choice([1, 1, 2])))
            tracked.happened(graph.add(f"c{number}", inputs, outputs, is_native=is_native, predicted_s=1.0))
        elif kind == "get":
            tracked.get(name, random.choice(MARKS))
        elif kind == "release":
            tracked.release(*random.choice(tracked.model.marks or [(name, LATENCY)]))
        elif kind == "set":
            tracked.happened(graph.set_value(name))
        elif kind == "forget":
            graph.forget(name)
        elif kind == "own" and calls - tracked.model.natives:
            annotated = random.choice(sorted(calls - tracked.model.natives))
            tracked.annotate(annotated, random.choice([LATENCY, THROUGHPUT, None]))
        elif calls and kind == "break":
            tracked.happened(graph.cancel(random.choice(sorted(calls))))
        elif calls:
            run(tracked, random.choice(sorted(calls)))
    except GraphError:
        pass  # refused: what that leaves behind is tested with the graph


def run(tracked: Tracked, call_id: str) -> None:
    graph = tracked.graph
    if graph.call_state(call_id) == "ready":
        tracked.happened(graph.start(call_id))
    elif unset(graph, call_id):
        tracked.happened(graph.produce(call_id, unset(graph, call_id)[0]))
    else:
        tracked.happened(graph.finish(call_id))


@given(seed=st.integers(0, 2**32))
def test_after_every_event_the_deduction_is_what_it_would_be_made_anew(seed: int) -> None:
    tracked, random = Tracked(), Random(seed)
    for number in range(60):
        if random.random() < 0.05:
            tracked.prefer(random.choice([LATENCY, LATENCY, THROUGHPUT, None]))
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
        while tracked.graph.call_state(call_id) in {"ready", "running"}:
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
        assert counted(offers) == Counter(needs)
        assert bool(offers) == bool(needs)
    assert len(offers._heap) <= 2 * 5 + 8 + 5, "what is outdated does not pile up"


def paths(graph: RequestGraph, call_id: str) -> Iterator[list[str]]:
    """Every way from a call without producers to this one."""
    producers = set(graph.call(call_id).producers())
    if not producers:
        yield [call_id]
    for producer in producers:
        yield from ([*path, call_id] for path in paths(graph, producer))


@given(seed=st.integers(0, 2**32), calls=st.integers(1, 9))
def test_with_one_awaited_variable_a_stage_is_the_longest_of_all_paths(seed: int, calls: int) -> None:
    app, random = Application(), Random(seed)
    natives = {f"c{number}" for number in range(calls) if random.random() < 0.25}
    for call in random_dag(random, calls):
        app.deductions.apply(app.graph.add(*call, is_native=call[0] in natives, predicted_s=1.0))
    app.deductions.get(f"o{calls - 1}", LATENCY)
    found = list(paths(app.graph, f"c{calls - 1}"))
    for number in range(calls):
        call_id = f"c{number}"
        behind = [path[path.index(call_id) + 1 :] for path in found if call_id in path and call_id not in natives]
        distances = [len([other for other in path if other not in natives]) for path in behind]
        assert app.deductions.of(call_id).stage == max(distances, default=None)
