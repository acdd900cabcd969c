"""When a request was received, which vLLM's scheduler is told by another process's clock."""

from __future__ import annotations

import pytest

from e2e.real_schedulers.built_engine import Clock
from e2e.real_schedulers.on_vllm.fixtures import Build
from e2e.real_schedulers.workloads import prompt

TIME_OF_DAY = 1_000_000.0
"""When every request is sent."""


@pytest.mark.parametrize(("late_s", "waited_s"), [(0.4, 0.4), (90.0, 1.0), (-90.0, 0.0)])
def test_a_request_was_received_when_the_api_server_had_it(build: Build, late_s: float, waited_s: float) -> None:
    """It may have waited for as long as an iteration; a greater difference is that of two machines' clocks."""
    engine, clock = build(plait={"scheduler": "fcfs"}), Clock()
    engine.follow_clock(clock)
    engine.driver._wall_clock = lambda: TIME_OF_DAY + late_s
    engine.add(prompt(90, 1), 50, arrival_time=TIME_OF_DAY)
    for _ in range(4):
        step = engine.scheduler.schedule()
        clock.now_s += 1.0
        engine.finish_step(step)
    engine.add(prompt(90, 2), name="b", arrival_time=TIME_OF_DAY)
    request = engine.scheduler.requests["b"]
    assert clock.now_s - request.plait_call.received_s == pytest.approx(waited_s)
