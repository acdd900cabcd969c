"""What the driver reports of the promises that the engine kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from e2e.real_schedulers.on_sglang.engine import CHUNK_TOKENS, Engine
from e2e.real_schedulers.on_sglang.fixtures import Build
from plait.backends.sglang.step_clock import StepClock


class Clock:
    """Stands still until it is set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def promising(build: Build, clock: Clock) -> Callable[[], Engine]:
    def build_with_clock() -> Engine:
        engine = build(plait={"scheduler": "fcfs"})
        engine.driver.clock = StepClock(clock)
        return engine

    return build_with_clock


def run(engine: Engine, clock: Clock) -> None:
    """A step takes a second."""
    while engine.busy:
        engine.step()
        clock.now_s += 1.0


def attainment(engine: Engine) -> float | None:
    return engine.driver.report(None, None).scheduler.slo_attainment


def ask(engine: Engine, name: str, output_tokens: int = 3, **annotations: Any) -> None:
    """Send a prompt that needs nearly a whole step."""
    engine.add([ord(name), *range(239)], output_tokens, name=name, **annotations)


def test_it_is_what_the_engine_did(promising: Callable[[], Engine], clock: Clock) -> None:
    engine = promising()
    ask(engine, "a")
    run(engine, clock)
    assert attainment(engine) is None, "it was promised nothing"
    ask(engine, "b", plait_ttft_ms=3500, plait_tpot_ms=1100)
    ask(engine, "c", plait_ttft_ms=500)
    run(engine, clock)
    assert attainment(engine) == 0.5
    ask(engine, "d", plait_jct_ms=90_000)
    ask(engine, "e", plait_ttft_ms=9000, plait_jct_ms=90_000, plait_age_ms=9000)
    run(engine, clock)
    assert attainment(engine) == 0.5, "e had waited elsewhere"


def test_a_call_that_is_given_up_counts_if_it_was_late(promising: Callable[[], Engine], clock: Clock) -> None:
    engine = promising()
    engine.add(list(range(500, 500 + CHUNK_TOKENS)), 50)
    for name in "ab":
        ask(engine, name, plait_ttft_ms=500)
    engine.step()
    engine.abort("b")
    engine.abort("a")
    engine.step()
    assert attainment(engine) is None, "no time has passed"
    engine.add(list(range(200, 200 + CHUNK_TOKENS)), 50)
    ask(engine, "c", plait_ttft_ms=500)
    engine.step()
    clock.now_s += 1.0
    engine.abort("c")
    engine.step()
    assert attainment(engine) == 0.0
    ask(engine, "d", plait_ttft_ms=5000, output_tokens=50)
    for _ in range(6):
        engine.step()
    engine.abort("d")
    for _ in range(3):
        engine.step()
    assert attainment(engine) == 0.5, "it had its first token"
