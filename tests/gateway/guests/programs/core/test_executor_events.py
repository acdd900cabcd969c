"""The executor against an oracle: whatever the order of arrival, the same values come out, and nothing stays behind."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import FailedDependencyError
from plait.gateway.guests.programs.core.held_call import HeldCall
from tests.gateway.guests.programs.core.session_calls import Core, Waiting, owner
from tests.invariants import check

CALLS = 8


@dataclass(frozen=True)
class Program:
    """Call n makes `v{n}` of the variables of some earlier calls; some fail."""

    inputs: tuple[tuple[int, ...], ...]
    failing: frozenset[int]

    def value(self, number: int) -> str | None:
        """The oracle: what `v{number}` has to be, None if it fails."""
        if number in self.failing:
            return None
        values = [self.value(before) for before in self.inputs[number]]
        return None if None in values else f"{number}({','.join(value for value in values if value is not None)})"


@st.composite
def programs(draw: st.DrawFn) -> Program:
    size = draw(st.integers(1, CALLS))
    inputs = [tuple(draw(st.sets(st.integers(0, number - 1), max_size=3))) if number else () for number in range(size)]
    return Program(tuple(inputs), draw(st.frozensets(st.integers(0, size - 1), max_size=2)))


class Run:
    """One order of arrival of a program's calls and gets, and of their ends."""

    def __init__(self, program: Program, random: Random) -> None:
        self.core = Core()
        self.session = self.core.session()
        self.gets = [Waiting(f"v{number}") for number in range(len(program.inputs))]
        self._program = program
        self._random = random
        self._running: dict[int, HeldCall] = {}
        self._arriving = [(self._add, number) for number in range(len(self.gets))]
        self._arriving += [(self._get, number) for number in range(len(self.gets))]
        random.shuffle(self._arriving)
        self._now_s = 0.0

    def step(self) -> bool:
        """Something arrives or ends; False when nothing is left."""
        self._now_s += 1.0
        able = [number for number, call in self._running.items() if owner(call).ready]
        if self._arriving and (not able or self._random.random() < 0.6):
            arrive, number = self._arriving.pop()
            arrive(number)
        elif able:
            self._finish(self._random.choice(able))
        else:
            return False
        self._running = {number: call for number, call in self._running.items() if owner(call).error is None}
        check(self.core.executor)
        return True

    def _get(self, number: int) -> None:
        self.core.executor.variables.get(self.session, self.gets[number].getter, self._now_s)

    def _add(self, number: int) -> None:
        names = " ".join(f"v{before}" for before in self._program.inputs[number])
        with suppress(FailedDependencyError):
            self._running[number] = self.core.add(f"C{number}", names, [f"v{number}"], self._now_s, held_bytes=10)

    def _finish(self, number: int) -> None:
        call = self._running.pop(number)
        started = owner(call).ready
        assert started is not None
        if number in self._program.failing:
            self.core.executor.fail(call, "failed", self._now_s)
        else:
            values = ",".join(started.values[f"v{before}"] for before in self._program.inputs[number])
            self.core.run(call, f"{number}({values})", now_s=self._now_s)


@given(programs(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_never_changes_a_value(program: Program, random: Random) -> None:
    run = Run(program, random)
    while run.step():
        pass
    for number, waiting in enumerate(run.gets):
        (told,) = waiting.told
        expected = program.value(number)
        assert (told if expected is not None else told.code) == (expected or "variable_failed")


@given(programs(), st.randoms(use_true_random=False), st.integers(0, 20))
def test_a_session_that_ends_at_any_time_leaves_nothing_behind(program: Program, random: Random, steps: int) -> None:
    run = Run(program, random)
    for _ in range(steps):
        run.step()
    run.core.executor.endings.end(run.session, "was deleted", 0.0)
    check(run.core.executor)
    tenant = run.session.tenant
    assert (run.core.executor.sessions.tenants, len(run.core.executor.sessions)) == ({}, 0)
    assert (tenant.variables, tenant.waiting_calls, tenant.held_bytes) == (0, 0, 0)
    assert all(len(waiting.told) <= 1 for waiting in run.gets)
