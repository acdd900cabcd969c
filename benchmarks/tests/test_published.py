"""AccelGen's own choices, in numbers that can be checked by hand."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.schedulers.published import ChunkedObjectives, pivot_budget
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Slo
from tests.policy.scheduling.fake_engine import COSTS

PACE = Pace(longest_s=0.2, shortest_s=0.01, chunk_tokens=500.0, tokens_per_s=5000.0)


@pytest.mark.parametrize(
    ("slo_s", "tokens"), [(0.0501, 450), (0.1001, 900), (0.2001, 1800), (9.0, 2048), (inf, 2048), (0, 0)]
)
def test_equation_6(slo_s: float, tokens: int) -> None:
    """The pivot is at 900 tokens and 0.1 s."""
    model = IterationModel()
    model.expect(COSTS)
    budget = pivot_budget(2048, model)
    budget.take_decodes(100, 9_000)
    budget.limit_s = slo_s
    assert budget.room(10_000, 500) == max(0, tokens - 100)


def test_without_a_pivot_only_the_engines_maximum_counts() -> None:
    budget = pivot_budget(2048, IterationModel())
    budget.limit_s = 1e-9
    assert (budget.room(10_000), budget.time_s(500)) == (2048, 0.0)


def test_a_prompts_remaining_time_is_its_slo_less_waiting_and_a_longest_iteration_a_chunk() -> None:
    call, slo = LocalCall("c", 10.0, 1200), Slo(ttft_s=1.0)
    remaining_s, due_s = ChunkedObjectives().timer(10.3, PACE)(call, slo, 1200)
    assert due_s == pytest.approx(1.0 - 0.3)
    assert remaining_s == pytest.approx(1.0 - 0.3 - 3 * 0.2)


def test_a_decode_is_one_chunk() -> None:
    objectives, slo = ChunkedObjectives(), Slo(ttft_s=1.0, tpot_s=0.1)
    call = LocalCall("c", 0.0, 10, 10, 1, slo=slo)
    objectives.on_plan(5.0, [call], [])
    call.output_tokens = 3
    assert objectives.timer(5.25, PACE)(call, slo, 1)[0] == pytest.approx(0.05 - 0.2)
