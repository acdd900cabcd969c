"""A plan knows the iteration that the engine computes while the plan is made, and when this iteration began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from e2e.real_schedulers.built_engine import Build, Clock
from e2e.real_schedulers.plans import everything
from e2e.real_schedulers.workloads import prompt
from plait.policy.scheduling.plan import EngineFacts, IterationWork, LocalCall, Plan


class Watching:
    """Keeps what was in flight at each plan: the work, and the seconds from the first plan to its beginning."""

    def __init__(self) -> None:
        self.seen: list[tuple[IterationWork, float] | None] = []
        self._first_s: float | None = None

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        if self._first_s is None:
            self._first_s = now_s
        flying = facts.in_flight
        self.seen.append(None if flying is None else (flying.work, flying.began_s - self._first_s))
        return everything(list(waiting), list(running))


@pytest.fixture
def policy() -> Watching:
    return Watching()


@pytest.fixture
def engine(build: Build, policy: Watching) -> Any:
    """Its iterations take a second."""
    clock, engine = Clock(), build(policy)

    def compute() -> None:
        clock.now_s += 1.0

    engine.follow_clock(clock)
    engine.before_result = compute
    return engine


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> bool:
    """Whether the engine plans an iteration while the one before is computed."""
    return request.node.callspec.params["build"] is True


def test_chunks_and_decodes_in_flight(engine: Any, policy: Watching, ahead: bool) -> None:
    """The second iteration is planned when the first begins. From then on each begins when the one before ends."""
    most = engine.batch_tokens
    engine.add(prompt(2 * most + 10, 1), 3, name="a")
    for _ in range(5):
        engine.step()
    work = [([most], [0]), ([most], [most]), ([10], [2 * most]), ([1], [2 * most + 10])]
    computed = [(IterationWork.of(*one), float(number)) for number, one in enumerate(work)]
    assert policy.seen == ([None, *computed] if ahead else [None] * 5)


def test_nothing_is_in_flight_after_a_rest(engine: Any, policy: Watching) -> None:
    engine.add(prompt(50, 1), 3, name="a")
    engine.run()
    plans = len(policy.seen)
    engine.add(prompt(50, 2), 3, name="b")
    engine.step()
    assert policy.seen[0] is policy.seen[plans] is None


def test_an_aborted_call_is_computed_to_the_iterations_end(engine: Any, policy: Watching, ahead: bool) -> None:
    engine.add(prompt(50, 1), 9, name="a")
    for _ in range(2):
        engine.step()
    engine.abort("a")
    engine.add(prompt(60, 2), 9, name="b")
    engine.step()
    assert policy.seen[2] == ((IterationWork.of([1], [50]), 1.0) if ahead else None)
