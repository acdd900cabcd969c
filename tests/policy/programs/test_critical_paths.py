"""Shares of end-to-end times: what they amount to, and after every event those that the whole graph gives anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.programs.needs import Mark
from plait.policy.programs.objectives import Deductions
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import CallState, Effects, GraphError
from plait.policy.types import Objective, Slo
from tests.invariants import check
from tests.policy.programs.graph_events import unset
from tests.policy.programs.jct_shares import jct_shares

JCT = Slo(jct_s=16.0)


class Job:
    """A graph, what is deduced on it, and how long calls take, which are written `name seconds: inputs -> output`."""

    def __init__(self, *calls: str) -> None:
        self.graph = RequestGraph()
        self.times_s: dict[str, float] = {}
        self.deductions = Deductions(self.graph)
        for call in calls:
            head, _, links = call.partition(":")
            name, time_s = head.split()
            inputs, _, output = links.partition("->")
            self.times_s[name] = float(time_s)
            self.apply(self.graph.add(name, inputs.split(), output.split(), predicted_s=float(time_s)))

    def apply(self, effects: Effects) -> None:
        self.deductions.apply(effects)

    def run(self, name: str, output: str) -> None:
        for effects in (self.graph.start(name), self.graph.produce(name, output)):
            self.apply(effects)

    def shares(self, left_s: float = 16.0) -> dict[str, float]:
        """Of the calls that are ready or run."""
        graph, times_s = self.graph, self.times_s
        calls = [name for name in times_s if graph.call_state(name) in {CallState.READY, CallState.RUNNING}]
        return self.deductions.paths.shares(calls, lambda _variable: left_s, times_s.__getitem__)


MAP_REDUCE = ("short 1: -> p1", "long 4: -> p2", "reduce 4: p1 p2 -> end", "beside 9: -> other")


def test_a_jct_is_divided_in_proportion_to_predicted_times_on_the_critical_path() -> None:
    job = Job(*MAP_REDUCE)
    job.deductions.get("end", JCT)
    assert job.shares() == {"short": 8.0, "long": 8.0}, "the shorter map has as long as the longer one"
    assert set(job.deductions.paths.upstream("end")) == {"short", "long", "reduce"}
    job.run("short", "p1")
    job.run("long", "p2")
    assert job.shares(6.0) == {"reduce": 6.0}


def test_what_is_left_is_shared_by_what_is_left_to_do() -> None:
    job = Job("a 9: -> x", "b 1: x -> y", "c 2: y -> z")
    job.deductions.get("z", JCT)
    job.run("a", "x")
    assert job.shares(6.0) == {"b": 2.0}
    job.times_s["b"] = 4.0
    assert job.shares(6.0) == {"b": 4.0}, "it is ready, and its prompt turned out to be longer"
    assert job.shares(-1.0) == {"b": 0.0}
    job.times_s |= {"b": 0.0}
    assert job.shares(6.0) == {"b": 0.0}


@pytest.mark.parametrize("mark", [Objective.LATENCY, Slo(ttft_s=1.0)])
def test_nobody_has_a_share_of_what_nobody_asks_for_or_nobody_is_to_make(mark: Mark) -> None:
    job = Job(*MAP_REDUCE)
    job.deductions.get("unheard of", JCT)
    job.deductions.get("end", mark)
    assert job.shares() == {}
    job.deductions.get("end", JCT)
    assert job.shares() != {}
    job.deductions.release("end", JCT)
    assert job.shares() == {}
    job.deductions.get("other", JCT)
    job.run("beside", "other")
    assert job.shares() == {}, "it has been made"


def test_a_call_that_may_come_yet_lengthens_the_way_of_those_before_it() -> None:
    job = Job("c 1: y -> z", "a 1: -> x")
    job.deductions.get("z", JCT)
    assert job.shares() == {}
    job.times_s["b"] = 2.0
    job.apply(job.graph.add("b", ["x"], ["y"], predicted_s=2.0))
    assert job.shares() == {"a": 4.0}


def test_what_waits_for_something_nobody_makes_is_on_the_critical_path_too() -> None:
    job = Job("a 1: -> x", "slow 7: client -> y", "end 1: x y -> z")
    job.deductions.get("z", JCT)
    assert job.shares() == {"a": 14.0}


def test_of_several_awaited_variables_the_tightest_share_counts() -> None:
    job = Job("a 1: -> x", "b 1: x -> y", "c 2: x -> z")
    left_s = {"y": 4.0, "z": 9.0}
    for variable in left_s:
        job.deductions.get(variable, JCT)
    assert job.deductions.paths.shares(["a"], left_s.__getitem__, job.times_s.__getitem__) == {"a": 2.0}
    left_s["z"] = 3.0
    assert job.deductions.paths.shares(["a"], left_s.__getitem__, job.times_s.__getitem__) == {"a": 1.0}


# Against shares worked out anew

VARIABLES = [f"v{number}" for number in range(10)]
MARKS: list[Mark] = [Slo(jct_s=9.0), Slo(jct_s=9.0), Slo(jct_s=30.0, ttft_s=1.0), Slo(ttft_s=1.0), Objective.LATENCY]


class Tracked:
    """A session as its executor sees it, with a clock; after every event the shares are those of the whole graph."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_s = 0.0
        self.graph = RequestGraph()
        self.predicted_s: dict[str, float] = {}
        self.ready_s: dict[str, float] = {}
        self.gets: list[tuple[str, Mark]] = []
        self.deductions = Deductions(self.graph)

    def calls(self, *states: CallState) -> list[str]:
        return [call_id for call_id in self.predicted_s if self.graph.call_state(call_id) in states]

    def happened(self, effects: Effects) -> None:
        if effects.added is not None:
            self.predicted_s[effects.added] = self.random.choice([0.0, 1.0, self.random.uniform(0.0, 5.0)])
            if effects.added in self.graph:
                self.graph.call(effects.added).predicted_s = self.predicted_s[effects.added]
        self.deductions.apply(effects)
        for call_id in effects.ready:
            self.ready_s[call_id] = self.now_s
            self.predicted_s[call_id] = self.random.uniform(0.0, 5.0)
        done = {effects.variable_set, *(name for name, _ in effects.variables_failed)}
        self.gets = [(name, mark) for name, mark in self.gets if name not in done]
        for ended in effects.ended:
            self.predicted_s.pop(ended.call_id)
            self.ready_s.pop(ended.call_id, None)

    def left_s(self, call_id: str) -> float:
        elapsed_s = self.now_s - self.ready_s.get(call_id, self.now_s)
        return max(0.0, self.predicted_s[call_id] - elapsed_s)

    def check(self) -> None:
        check(self.deductions)
        due_s = {
            name: mark.jct_s - 0.3 * self.now_s for name, mark in self.gets if isinstance(mark, Slo) and mark.jct_s
        }
        anew = {name: jct_shares(self.graph, name, left_s, self.left_s) for name, left_s in due_s.items()}
        calls = self.calls(CallState.READY, CallState.RUNNING)
        shares = self.deductions.paths.shares(calls, due_s.__getitem__, self.left_s)
        found = {call_id: [shares[call_id] for shares in anew.values() if call_id in shares] for call_id in calls}
        assert shares == {call_id: min(several) for call_id, several in found.items() if several}
        for call_id in calls:
            one = self.deductions.paths.shares([call_id], due_s.__getitem__, self.left_s)
            assert one == {other: share_s for other, share_s in shares.items() if other == call_id}
        for name, upstream in anew.items():
            assert set(self.deductions.paths.upstream(name)) == upstream.keys()


def add(tracked: Tracked, random: Random, name: str) -> None:
    free = [name for name in VARIABLES if tracked.graph.producer(name) is None]
    inputs = random.choices(VARIABLES, k=random.randrange(4))
    call_id = next(f"c{number}" for number in range(99) if f"c{number}" not in tracked.graph)
    tracked.happened(tracked.graph.add(call_id, inputs, random.sample(free, min(len(free), random.choice([1, 1, 2])))))


def get(tracked: Tracked, random: Random, name: str) -> None:
    mark = random.choice(MARKS)
    if (name, mark) not in tracked.gets and tracked.graph.variable_state(name) not in {"set", "failed"}:
        tracked.gets.append((name, mark))
        tracked.deductions.get(name, mark)


def release(tracked: Tracked, random: Random, name: str) -> None:
    if tracked.gets:
        tracked.deductions.release(*tracked.gets.pop(random.randrange(len(tracked.gets))))


def run(tracked: Tracked, random: Random, name: str) -> None:
    graph, calls = tracked.graph, tracked.calls(CallState.READY, CallState.RUNNING)
    if calls:
        call_id = random.choice(calls)
        outputs = unset(graph, call_id)
        if call_id in tracked.calls(CallState.READY):
            tracked.happened(graph.start(call_id))
        elif outputs:
            tracked.happened(graph.produce(call_id, outputs[0]))
        else:
            tracked.happened(graph.finish(call_id))


def break_off(tracked: Tracked, random: Random, name: str) -> None:
    if tracked.predicted_s:
        tracked.happened(tracked.graph.cancel(random.choice(list(tracked.predicted_s))))


def set_value(tracked: Tracked, random: Random, name: str) -> None:
    tracked.happened(tracked.graph.set_value(name))


def forget(tracked: Tracked, random: Random, name: str) -> None:
    tracked.graph.forget(name)


EVENTS: list[Callable[[Tracked, Random, str], None]] = [
    *[add] * 6,
    *[get] * 3,
    *[run] * 4,
    release,
    set_value,
    break_off,
    *[forget] * 2,
]


@given(seed=st.integers(0, 2**32))
def test_after_every_event_the_shares_are_what_they_would_be_made_anew(seed: int) -> None:
    random = Random(seed)
    tracked = Tracked(random)
    for _ in range(60):
        tracked.now_s += random.choice([0.0, 0.5])
        try:
            random.choice(EVENTS)(tracked, random, random.choice(VARIABLES))
        except GraphError:
            continue  # refused: what that leaves behind is tested with the graph
        tracked.check()


def paths(graph: RequestGraph, call_id: str) -> Iterator[list[str]]:
    """Every way from a call without producers to this one."""
    producers = set(graph.call(call_id).producers())
    if not producers:
        yield [call_id]
    for producer in producers:
        yield from ([*path, call_id] for path in paths(graph, producer))


@given(seed=st.integers(0, 2**32), calls=st.integers(1, 8), left_s=st.floats(0.1, 100.0))
def test_shares_fit_on_every_path_and_fill_the_critical_one(seed: int, calls: int, left_s: float) -> None:
    random = Random(seed)
    graph = RequestGraph()
    for number in range(calls):
        graph.add(f"c{number}", random.sample([f"o{i}" for i in range(number)], min(number, 3)), [f"o{number}"])
    times_s = {f"c{number}": random.uniform(0.1, 5.0) for number in range(calls)}
    shares = jct_shares(graph, f"o{calls - 1}", left_s, times_s.__getitem__)
    found = list(paths(graph, f"c{calls - 1}"))
    assert shares.keys() == {call_id for path in found for call_id in path}
    critical = max(found, key=lambda path: sum(times_s[call_id] for call_id in path))
    scale = left_s / sum(times_s[call_id] for call_id in critical)
    assert all(shares[call_id] >= scale * times_s[call_id] * (1 - 1e-9) for call_id in shares)
    assert [shares[call_id] for call_id in critical] == pytest.approx([scale * times_s[c] for c in critical])
    assert all(sum(shares[call_id] for call_id in path) <= left_s * (1 + 1e-9) for path in found)


def test_no_ways_are_kept_where_nobody_asks_for_an_end_to_end_time() -> None:
    job = Job(*MAP_REDUCE)
    job.deductions.get("end", Objective.LATENCY)
    assert job.deductions.paths._below_s == {}
    job.deductions.get("end", JCT)
    job.deductions.release("end", JCT)
    assert job.deductions.paths._below_s == {}
