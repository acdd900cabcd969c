"""A program entered as a whole: like its parts with the first calls held back, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from plait.backends.errors import (
    CallerError,
    ConflictError,
    GatewayStoppingError,
    LimitError,
    PlaitError,
    ValueTooLargeError,
)
from plait.gateway.guests.programs.core.held_call import HeldCall, Output, ReadyCall
from plait.gateway.guests.programs.program import Program, entry
from plait.policy.programs.needs import Mark
from plait.policy.types import Objective, Slo
from tests.gateway.guests.programs.core.session_calls import Core, Owner, Waiting, owner
from tests.invariants import check
from tests.pieces import at_once

BEGIN = "begin"
MARKS = [None, Objective.LATENCY, Objective.THROUGHPUT, Slo(ttft_s=0.3), Slo(jct_s=5.0)]


def call_of(name: str, inputs: str = "", outputs: str = "", **more: Any) -> HeldCall:
    return HeldCall(name, tuple(inputs.split()), tuple(map(Output, outputs.split())), Owner(), **more)


def enter(core: Core, *calls: HeldCall, gets: tuple[Waiting, ...] = (), **values: str) -> None:
    places = {f"calls[{index}]": call for index, call in enumerate(calls)}
    program = Program(values, places, [got.getter for got in gets])
    at_once(entry(core.executor, core.session(), program, 0.0))
    check(core.executor)


def ready(call: HeldCall) -> ReadyCall:
    told = owner(call).ready
    assert told is not None, f"{call.call_id} is not ready"
    return told


# As one event.


@pytest.mark.parametrize("gather_ms", [0, 10])
def test_the_first_stage_runs_as_one_group_with_its_objective(gather_ms: float) -> None:
    core, latency = Core(gather_ms=gather_ms), Objective.LATENCY
    maps = [call_of(f"M{number}", "task", f"m{number}", prompt_tokens=10) for number in range(16)]
    reduce = call_of("R", " ".join(f"m{number}" for number in range(16)), "r")
    enter(core, *maps, reduce, gets=(Waiting("r", latency),), task="it")
    assert {ready(call).objective for call in maps} == {latency}
    groups = {ready(call).group for call in maps}
    assert [group.calls for group in groups if group is not None] == [16]


def test_without_an_objective_nothing_gathers() -> None:
    core, call = Core(gather_ms=10), call_of("A", "", "a")
    enter(core, call)
    assert ready(call) == ReadyCall({}, 0.0)


def test_calls_of_the_session_that_it_concerns_run_with_it() -> None:
    core = Core(gather_ms=10)
    gathering, waiting = core.add("A", outputs=["a"]), core.add("B", "x", ["b"])
    enter(core, call_of("C", "a b", "c"), gets=(Waiting("c", Objective.LATENCY),), x="1")
    assert [group.calls for call in (gathering, waiting) if (group := ready(call).group) is not None] == [2, 2]
    assert ready(gathering).objective is ready(waiting).objective is Objective.LATENCY


@dataclass(frozen=True)
class Drawn:
    """Each call's inputs (numbers of calls before it, or values), its objective, and the gets by variable."""

    inputs: list[list[str]]
    objectives: list[Objective | None]
    gets: dict[str, Mark | None]
    order: list[int]

    @property
    def values(self) -> dict[str, str]:
        return {"x": "some text", "y": ""}

    def calls(self, *more: str) -> list[HeldCall]:
        return [
            call_of(
                f"C{number}", " ".join((*self.inputs[number], *more)), f"v{number}",
                objective=self.objectives[number], prompt_tokens=10 + number,
            )
            for number in self.order
        ]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Drawn:
    size = draw(st.integers(1, 8))
    sources = [[*(f"v{before}" for before in range(number)), "x", "y"] for number in range(size)]
    return Drawn(
        [sorted(draw(st.sets(st.sampled_from(names), max_size=4))) for names in sources],
        [draw(st.sampled_from([None, None, Objective.LATENCY, Objective.THROUGHPUT])) for _ in range(size)],
        draw(st.dictionaries(st.sampled_from([f"v{number}" for number in range(size)]), st.sampled_from(MARKS))),
        draw(st.permutations(range(size))),
    )


def run_to_the_end(core: Core, calls: list[HeldCall]) -> dict[str, ReadyCall]:
    """How each call was started. The ready call of the lowest number runs next."""
    started: dict[str, ReadyCall] = {}
    while len(started) < len(calls):
        call = min(
            (call for call in calls if owner(call).ready and call.call_id not in started), key=lambda call: call.call_id
        )
        started[call.call_id] = ready(call)
        core.run(call, f"text of {call.call_id}", now_s=0.1 * len(started))
        check(core.executor)
    return started


@given(drawn=programs())
def test_it_is_like_its_parts_with_the_first_calls_held_back(drawn: Drawn) -> None:
    whole, parts = Core(gather_ms=10), Core()
    entered, held_back = drawn.calls(), drawn.calls(BEGIN)
    at_once = [Waiting(name, mark) for name, mark in drawn.gets.items()]
    enter(whole, *entered, gets=tuple(at_once), **drawn.values)

    for name, value in drawn.values.items():
        parts.executor.variables.set_value(parts.session(), name, value, 0.0)
    one_by_one = [parts.get(name, mark) for name, mark in drawn.gets.items()]
    for call in held_back:
        parts.executor.add(parts.session(), call, 0.0)
    parts.executor.variables.set_value(parts.session(), BEGIN, "", 0.0)

    expected = {
        name: replace(started, values={key: text for key, text in started.values.items() if key != BEGIN})
        for name, started in run_to_the_end(parts, held_back).items()
    }
    assert run_to_the_end(whole, entered) == expected
    assert [got.told for got in at_once] == [got.told for got in one_by_one]


# All of it or nothing.


@pytest.mark.parametrize(
    ("calls", "gets", "values", "refusal"),
    [
        ([("A", "", "a"), ("B", "", "a")], "", {}, (ConflictError, "calls[1] (a): ", "calls[1].placeholders")),
        ([("A", "b", "a"), ("B", "a", "b")], "", {}, (ConflictError, "calls[1] (b): ", "calls[1].placeholders")),
        ([("A", "", "a")], "", {"a": "1"}, (ConflictError, "calls[0] (a): ", "calls[0].placeholders")),
        ([("A", "", "old")], "", {}, (ConflictError, "calls[0] (old): ", "calls[0].placeholders")),
        ([("A", "pending", "gap")], "", {}, (ConflictError, "calls[0] (gap): ", "calls[0].placeholders")),
        ([("A", "none", "a")], "", {}, (CallerError, "calls[0] (a): ", "calls[0].placeholders")),
        ([], "none", {}, (CallerError, "gets.none: ", "gets.none")),
        ([], "", {"old": "2"}, (ConflictError, "values.old: ", "values.old")),
        ([], "", {"long": "x" * 101}, (ValueTooLargeError, "values.long: ", "values.long")),
        ([], "", {"x": "x" * 99, "y": "y" * 99}, (ValueTooLargeError, "", None)),
        ([("A", "old", "a"), ("B", "a", "b"), ("C", "a", "c")], "", {}, (LimitError, "", None)),
        ([("A", "", "a b c d e f g h")], "", {}, (LimitError, "", None)),
    ],
)
def test_a_program_that_is_refused_leaves_nothing_behind(
    calls: list[tuple[str, str, str]],
    gets: str,
    values: dict[str, str],
    refusal: tuple[type[PlaitError], str, str | None],
) -> None:
    core = Core(max_variables=10, max_waiting_calls=2, max_value_bytes=100, max_held_bytes=150)
    core.executor.variables.set_value(core.session(), "old", "1", 0.0)
    core.add("S", "gap", ["pending"])
    good, waiting = call_of("G", "old", "good"), tuple(Waiting(name) for name in gets.split())
    kind, message, param = refusal
    with pytest.raises(kind) as caught:
        enter(core, *(call_of(*call) for call in calls), good, gets=waiting, **values)
    assert caught.value.message.startswith(message)
    assert caught.value.param == param
    check(core.executor)
    session = core.session()
    assert (list(session.variables()), session.values, session.getters) == (["old", "pending", "gap"], {"old": "1"}, {})
    assert owner(good).ready is None


def test_a_program_whose_session_ends_while_it_enters_is_told_why() -> None:
    core, calls = Core(), {f"calls[{number}]": call_of(f"C{number}", "", f"v{number}") for number in range(3)}
    session = core.session()
    pieces = entry(core.executor, session, Program({}, calls, []), 0.0)
    while not session.calls:
        next(pieces)
    core.executor.endings.end(session, GatewayStoppingError(), 0.0)
    with pytest.raises(GatewayStoppingError):
        at_once(pieces)
    check(core.executor)


def test_a_program_that_comes_again_enters_only_what_is_new() -> None:
    core, waiting = Core(), (Waiting("a"), Waiting("b"))
    first = call_of("A", "x", "a", fingerprint=b"1")
    enter(core, first, x="1")
    again, more = call_of("A2", "x", "a", fingerprint=b"1"), call_of("B", "a", "b", fingerprint=b"2")
    enter(core, again, more, gets=waiting, x="1")
    assert owner(again).ready is None
    core.run(first, "one")
    core.run(more, "two")
    assert [got.told for got in waiting] == [["one"], ["two"]]


def test_what_failed_is_made_again_whatever_its_place_in_the_program() -> None:
    core, waiting = Core(), Waiting("b")
    core.executor.fail(core.add("A", outputs=["a"]), "no", 0.0)
    after, again = call_of("B", "a", "b"), call_of("A2", "", "a")
    enter(core, after, again, gets=(waiting,))
    core.run(again, "one")
    core.run(after, "two")
    assert waiting.told == ["two"]


def test_a_call_on_what_failed_before_fails_and_so_does_the_get() -> None:
    core, waiting = Core(), Waiting("c")
    core.executor.fail(core.add("A", outputs=["a"]), "no", 0.0)
    good = call_of("D", "", "d")
    enter(core, call_of("B", "a", "b"), call_of("C", "b", "c"), good, gets=(waiting,))
    (error,) = waiting.told
    assert "its input b failed" in error.message
    assert ready(good) == ReadyCall({}, 0.0)
