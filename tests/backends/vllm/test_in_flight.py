"""The iterations that vLLM computes while the next one is planned."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends.vllm import plugin
from plait.policy.scheduling.plan import InFlight, IterationWork
from tests.backends.vllm import fake_package
from tests.backends.vllm.fake_package import BUDGET_TOKENS, build, send

CHUNKS = [IterationWork.of([BUDGET_TOKENS], [number * BUDGET_TOKENS]) for number in range(5)]


class Engine:
    """An engine that computes one long prompt, a chunk an iteration. Its iterations end when a test says so."""

    def __init__(self, scheduler: str = "slo") -> None:
        self.now_s = 1.0
        self._scheduler = build(scheduler=scheduler)
        self._scheduler.plait._clock = lambda: self.now_s
        self._outputs: list[Any] = []
        send(self._scheduler, "a", 10 * BUDGET_TOKENS)

    def plan(self) -> InFlight | None:
        """Plan an iteration; returns what is in flight at that time."""
        self._outputs.append(self._scheduler.schedule())
        in_flight: InFlight | None = self._scheduler.plait.planner.facts.in_flight
        return in_flight

    def end(self, now_s: float) -> None:
        """The first iteration in flight ends."""
        self.now_s = now_s
        self._scheduler.update_from_output(self._outputs.pop(0), None)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package.install(monkeypatch)
    monkeypatch.setattr(plugin, "install", lambda: None)


def test_nothing_is_in_flight_where_an_iteration_ends_before_the_next_is_planned() -> None:
    engine = Engine()
    for ends_s in (2.0, 3.0):
        assert engine.plan() is None
        engine.end(ends_s)


def test_the_next_iteration_begins_after_the_one_that_began_when_another_ended() -> None:
    engine = Engine()
    assert engine.plan() is None
    assert engine.plan() == InFlight(CHUNKS[0], 1.0), "it began when it was planned"
    engine.end(3.0)
    engine.now_s = 3.1
    assert engine.plan() == InFlight(CHUNKS[1], 3.0)


def test_it_begins_after_all_that_are_in_flight() -> None:
    """As with pipeline parallelism. Those before the latest last as long as the one that has ended."""
    engine = Engine()
    for _ in range(3):
        engine.plan()
    engine.end(3.0)
    assert engine.plan() == InFlight(CHUNKS[2], 3.0 + 2.0)
    engine.end(4.0)
    assert engine.plan() == InFlight(CHUNKS[3], 4.0 + 1.0)


def test_a_scheduler_that_does_not_measure_is_not_told() -> None:
    engine = Engine("fcfs")
    engine.plan()
    assert engine.plan() is None
