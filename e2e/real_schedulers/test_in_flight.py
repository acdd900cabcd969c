"""A plan knows the iteration that the engine computes while the plan is made, and when this iteration began."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.real_schedulers.built_engine import Build
from e2e.real_schedulers.plans import Watching, watched
from e2e.real_schedulers.workloads import prompt
from plait.policy.scheduling.plan import IterationWork


@pytest.fixture
def policy() -> Watching:
    return Watching()


@pytest.fixture
def engine(build: Build, policy: Watching) -> Any:
    return watched(build, policy)


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
