"""Lines of batches in a real engine: their prompts are computed in small parts beside other calls."""

from __future__ import annotations

import random

import pytest

from e2e.real_schedulers.built_engine import Build, Clock, answer
from e2e.real_schedulers.workloads import prompt

PLAIT = {"scheduler": "slo", "profile": "a6000-mistral-7b"}


def test_a_line_is_computed_in_parts_beside_a_decode(build: Build) -> None:
    engine = build(plait=PLAIT)
    engine.follow_clock(Clock())  # so it learns no times
    engine.add(prompt(50, 1), 100, name="online")
    engine.step()
    engine.add(prompt(400, 2), 4, name="line", plait_line=1)
    steps = engine.run()
    parts = [step["line"] for step in steps if step.get("line", 0) > 1]
    assert sum(parts) == 400
    assert max(parts) < 210
    assert all("online" in step for step in steps if step.get("line", 0) > 1)
    assert engine.tokens == {"online": answer(50, 100), "line": answer(400, 4)}


def test_a_line_alone_is_computed_as_any_call(build: Build) -> None:
    engine = build(plait=PLAIT)
    engine.add(prompt(60, 2), 4, name="line", plait_line=1)
    assert engine.step() == {"line": 60}


@pytest.mark.parametrize("seed", range(3))
def test_every_call_ends_whatever_is_a_line(build: Build, seed: int) -> None:
    engine, dice, wanted = build(plait=PLAIT), random.Random(seed), dict[str, list[int]]()
    for _ in range(120):
        if dice.random() < 0.3:
            length, output = dice.randrange(1, 500), dice.randrange(1, 30)
            name = engine.add(prompt(length, len(wanted)), output, plait_line=dice.randrange(2))
            wanted[name] = answer(length, output)
        engine.step()
    engine.run()
    assert engine.tokens == wanted
