"""Promises on an engine as engines run: short runs, and what a wrong profile does to calls without a promise."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.as_run import (
    BATCH_TOKENS,
    JITTER,
    KV_TOKENS,
    PROFILE,
    SHORT,
    STEPS_S,
    STOCK,
    NewRunner,
    Task,
    Told,
    draw,
    report,
    tasks,
)
from benchmarks.schedulers.engine_run import run
from plait.backends.profiles import load_profile
from plait.policy.scheduling.in_order import Fcfs
from plait.policy.scheduling.iteration_model import scaled
from plait.policy.scheduling.moment import SloSettings
from plait.policy.types import NO_SLO, Slo

H200 = load_profile(PROFILE).cost_model()


@pytest.mark.parametrize("step_s", STEPS_S)
def test_promises_are_kept_on_an_engine_that_plans_ahead(step_s: float) -> None:
    """Told nothing, so the first calls find an engine that is not known yet."""
    runner = NewRunner(12.0)(Path())
    stock, ours = (runner(Task(1, step_s, 0.05, system, 1)) for system in (STOCK, "nothing"))
    assert stock.kept < 0.5
    assert ours.kept > 0.85
    assert ours.long_ttft_s < 1.8 * stock.long_ttft_s
    assert ours.ends_s < 1.02 * stock.ends_s


def test_the_report_has_every_cell_and_the_curve() -> None:
    found = {task: NewRunner(1.0)(Path())(task) for task in tasks((1,), quick=True)}
    made = report((1,), found)
    assert len(made.results) == len([task for task in found if task.system != STOCK])
    assert {claim.name for claim in made.claims} >= {"tokens/s / stock's, at its worst"}


@pytest.mark.parametrize("seed", range(10))
def test_a_wrong_profile_starves_nobody(seed: int) -> None:
    """Profiles that are wrong by .4 to 2.5, steps, promises that can be kept and others; a third of calls has none."""
    rng = random.Random(seed)
    engine = replace(H200, step_s=rng.choice(STEPS_S))
    factor = rng.uniform(0.4, 2.5)
    wrong = scaled(engine, factor, factor * rng.uniform(0.8, 1.25), rng.choice((0.0, 0.01, 0.05)))
    told = rng.choice((None, wrong))
    unloaded_s = engine.prefill_time_s(SHORT.prompt_tokens)
    slo = Slo(ttft_s=unloaded_s * rng.uniform(1.05, 8.0), tpot_s=rng.uniform(0.02, 0.06))
    drawn = draw(engine, slo, 20.0, seed)
    calls = [replace(call, slo=NO_SLO) if rng.random() < 0.3 else call for call in drawn]
    ahead, ends_s, plain_s = rng.choice((0, 1)), [], []
    for scheduler in (Fcfs(), Told(told, SloSettings())):
        finished = run(
            *(scheduler, calls, engine),
            kv_tokens=KV_TOKENS,
            max_batch_tokens=BATCH_TOKENS,
            ahead=ahead,
            jitter=JITTER,
            seed=seed,
        )
        ttfts_s = sorted(record.ttft_s for record in finished.records if record.call.slo == NO_SLO)
        plain_s.append(ttfts_s[int(0.9 * len(ttfts_s))])
        ends_s.append(max(record.finished_s for record in finished.records))
    assert ends_s[1] <= ends_s[0] / 0.95
    assert plain_s[1] <= 2 * plain_s[0]
