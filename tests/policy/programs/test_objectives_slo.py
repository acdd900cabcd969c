"""The SLO fields of deduced objectives."""

from __future__ import annotations

import pytest

from plait.policy.programs.needs import Stage
from plait.policy.programs.objectives import GROUP_STRETCH, LATENCY_SLO, NOTHING, Deduction, slo_of, states_times
from plait.policy.types import NO_SLO, Objective, Slo
from tests.policy.programs.application import Application

LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT


def test_a_deduced_objective_becomes_slo_fields() -> None:
    group = Deduction(LATENCY, 1, Stage("c", 1))
    assert slo_of(Deduction(LATENCY, 0), 3.0) == LATENCY_SLO
    assert slo_of(Deduction(LATENCY, 0), 3.0, latency=Slo(ttft_s=2.0)) == Slo(ttft_s=2.0)
    assert slo_of(group, 3.0) == Slo(jct_s=3.0 * GROUP_STRETCH, is_deduced=True)
    assert slo_of(Deduction(THROUGHPUT), 3.0, share_s=1.0) is None
    assert slo_of(NOTHING, 3.0) is None


def test_what_is_explicit_wins_over_what_is_deduced() -> None:
    group = Deduction(LATENCY, 1, Stage("c", 1))
    own, asked = Slo(tpot_s=0.1), Slo(ttft_s=0.5, jct_s=60.0)
    assert slo_of(group, 3.0, own=own, asked=asked, share_s=4.0) == own
    assert slo_of(NOTHING, 3.0, own=own) == slo_of(Deduction(THROUGHPUT), 3.0, own=own) == own
    assert slo_of(group, 3.0, own=Slo()) == slo_of(group, 3.0), "nothing was said"
    assert slo_of(group, 3.0, share_s=4.0) == Slo(jct_s=4.0)
    assert slo_of(Deduction(LATENCY, 0), 3.0, asked=asked, share_s=4.0) == Slo(ttft_s=0.5, jct_s=4.0)
    assert slo_of(Deduction(LATENCY, 0), 3.0, asked=asked) == Slo(ttft_s=0.5), "60 s are not this call's"


@pytest.mark.parametrize(
    ("own", "asked", "stated"),
    [
        (None, None, False),
        (NO_SLO, Slo(jct_s=60.0), False),
        (Slo(jct_s=9.0), None, True),
        (None, Slo(tpot_s=0.1, jct_s=60.0), True),
        (NO_SLO, Slo(ttft_s=1.0), True),
    ],
)
def test_a_share_of_a_jct_is_deduced_and_the_other_times_of_a_get_are_stated(
    own: Slo | None, asked: Slo | None, stated: bool
) -> None:
    assert states_times(own, asked) == stated


def test_a_job_that_is_late_already_is_treated_as_one_without_a_deadline() -> None:
    assert slo_of(Deduction(LATENCY, 1, Stage("c", 1)), 3.0, share_s=0.0) == Slo(
        jct_s=3.0 * GROUP_STRETCH, is_deduced=True
    )
    assert slo_of(Deduction(LATENCY, 1), 3.0, share_s=-1.0) == LATENCY_SLO


def test_gets_with_figures_ask_for_the_tightest_of_each() -> None:
    app = Application("a:->x y", "b:x->z")
    for name, slo in (("x", Slo(ttft_s=1.0, tpot_s=0.1)), ("y", Slo(ttft_s=2.0, jct_s=9.0)), ("x", Slo(jct_s=8.0))):
        app.deductions.get(name, slo)
    app.deductions.get("y", LATENCY)
    assert app.deductions.asked("a") == Slo(ttft_s=1.0, tpot_s=0.1, jct_s=8.0)
    assert app.deductions.asked("b") is None
    assert app.deductions.of("a") == Deduction(LATENCY, 0)
