"""Calls with a TTFT or a JCT: where they go, and whether they are expected in time, by what is left of the times."""

from __future__ import annotations

import pytest

from plait.policy.costs.delay import CallToPlace, DelayCost
from plait.policy.placement.least_delay import least_delay
from plait.policy.types import Slo
from tests.policy.costs.test_delay import OUTPUT_TOKENS, Engine, call_of, place, situation


def in_time(*engines: Engine, slo: Slo, age_s: float = 0.0) -> tuple[str, bool | None]:
    placement = least_delay(call_of("prefix")._replace(slo=slo, arrived_s=-age_s), situation(*engines))
    return placement.engine_id, placement.meets_slo


def test_a_call_with_a_jct_goes_where_its_whole_answer_is_expected_in_time() -> None:
    """The answer of the first engine is there after 0.656 s. The second takes 0.634 s, and delays others."""
    queued, busy = Engine("prefix", waiting=(300,), contexts=(300,)), Engine(contexts=(100,) * 8)
    assert place(queued, busy)[0] == "0"
    assert [in_time(queued, busy, slo=Slo(jct_s=jct_s)) for jct_s in (1.0, 0.65, 0.01)] == [
        ("0", True),
        ("1", True),
        ("1", False),
    ]


def test_a_call_with_both_is_late_by_what_it_is_late_most() -> None:
    asked = CallToPlace(call_of("prefix"), OUTPUT_TOKENS, 2.0, jct_s=5.0)
    costs = [DelayCost(queue_s, 1.0, decode_s, 0.0, 0.0) for queue_s, decode_s in ((1, 3), (2, 3), (2, 1), (1, 6))]
    assert [asked.late_s(cost) for cost in costs] == [0.0, 1.0, 1.0, 3.0]


@pytest.mark.parametrize("slo", [Slo(ttft_s=5.33), Slo(jct_s=5.65)], ids=["ttft", "jct"])
def test_the_time_that_a_call_has_waited_is_not_left_any_more(slo: Slo) -> None:
    queued, busy = Engine("prefix", waiting=(300,), contexts=(300,)), Engine(contexts=(100,) * 8)
    assert [in_time(queued, busy, slo=slo, age_s=age_s) for age_s in (0.0, 5.0, 9.0)] == [
        ("0", True),
        ("1", True),
        ("1", False),
    ]


@pytest.mark.parametrize("slo", [None, Slo(), Slo(tpot_s=0.001)], ids=str)
def test_without_a_time_to_a_token_nothing_is_expected(slo: Slo | None) -> None:
    for engines in ([Engine()], [Engine(), Engine()]):
        assert least_delay(call_of("prefix")._replace(slo=slo), situation(*engines)).meets_slo is None


def test_a_call_with_a_jct_is_looked_at_where_there_is_one_engine_too() -> None:
    assert [in_time(Engine(), slo=Slo(jct_s=jct_s)) for jct_s in (10.0, 0.1)] == [("0", True), ("0", False)]
