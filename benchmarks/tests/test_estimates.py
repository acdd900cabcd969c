"""What wrong estimates cost: what is claimed of the figures, and how the engines are made wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.estimates import CASES, MOST, MOST_OF_RIVAL, SEEDS, SYSTEMS, Figures, Task, claims, markdown
from benchmarks.estimating.fleet import Load, Run, System, Wrong
from plait.lab.simulation.compare import Experiment, prepare
from plait.lab.simulation.simulate import CallRecord

ASKED = Experiment(calls=240, engines=2, turns=3)


@pytest.fixture(scope="module")
def load() -> Load:
    whole = prepare(ASKED, lambda *_: None)
    first, second = (
        replace(whole, calls=whole.calls[which], prompts=whole.prompts[which])
        for which in (slice(120), slice(120, None))
    )
    return Load(ASKED, first, second, rate_per_s=12.0)


def cached(records: list[CallRecord]) -> tuple[int, int]:
    """The tokens that were predicted, and that were found."""
    return sum(one.predicted_cached_tokens for one in records), sum(one.cached_tokens for one in records)


def test_right_estimates_decide_as_reports_do(load: Load) -> None:
    told, estimated = ([record.engine_id for record in Run(one, Wrong(), load)()] for one in ("oracle", "not told"))
    assert told == estimated


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_knows_the_hits_and_estimates_do_not(load: Load, case: str) -> None:
    prompts = sum(prompt.tokens for prompt in load.ours.prompts)
    expected, found = cached(Run("oracle", CASES[case], load)())
    assert abs(expected - found) < 0.02 * prompts
    expected, found = cached(Run("not told", CASES[case], load)())
    assert (expected > found) == (CASES[case] != Wrong())
    assert (found == 0) == (CASES[case].uncached == 2)


def test_a_run_is_the_same_each_time(load: Load) -> None:
    runs = [Run("answers", Wrong(others=True), load)() for _ in range(2)]
    assert runs[0] == runs[1]


def figures(**e2e_s: float) -> dict[System, Figures]:
    times = dict(zip(SYSTEMS, (1.0, 1.0, 1.2, 2.0), strict=True)) | e2e_s
    return {system: Figures(times[system], 0.5 * times[system], 0.8, 0.9) for system in SYSTEMS}


def test_each_workload_has_the_bounds() -> None:
    found = {
        **{
            Task("sessions", seed): {"nothing wrong": figures(), "other clients": figures(answers=1.2)}
            for seed in SEEDS
        },
        Task("documents", 1): {
            "nothing wrong": figures(),
            "other clients": figures(answers=1.21),
            "cache lost unseen": figures(),
        },
    }
    made = {(claim.name, claim.where): (round(claim.value, 3), claim.most, claim.holds) for claim in claims(found)}
    rival, oracle = "mean E2E, estimated / least outstanding", "mean E2E, estimated / oracle"
    assert made == {
        (rival, "sessions"): (0.5, MOST_OF_RIVAL, True),
        (rival, "sessions, wrong"): (0.6, MOST_OF_RIVAL, True),
        (rival, "documents"): (0.5, MOST_OF_RIVAL, True),
        (rival, "documents, wrong"): (0.55, MOST_OF_RIVAL, True),
        (oracle, "sessions"): (1.0, MOST, True),
        (oracle, "sessions, wrong"): (1.2, MOST, False),
    }
    row = "| sessions, other clients | 1.00 s, 0.50 s | 1.20, 1.20 | 1.20, 1.20 | 2.00, 2.00 "
    assert any(line.startswith(row) for line in markdown(found))
