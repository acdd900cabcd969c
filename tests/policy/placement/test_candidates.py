"""In a large fleet, a few engines are compared: those that are less busy or have more of the prompt than the others."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.costs.delay import CallToPlace, Offer, offer
from plait.policy.costs.prefill_queue import Prefill
from plait.policy.costs.situation import Overtaken, OvertakenInLine, Situation
from plait.policy.placement.least_delay import FEW, SMALL, candidates, least_delay, repay_copies
from plait.policy.types import Slo
from tests.policy.costs.test_delay import COMING, COSTS, ENGINES, Engine, call_of, situation, used


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Engine], Overtaken]:
    """Engines, of which some have calls that wait in the gateway, and the part of these that a call passes."""
    engines = draw(st.lists(ENGINES, min_size=1, max_size=15))
    passed, passed_calls = dict[str, OvertakenInLine](), 0.0
    for number, engine in enumerate(engines):
        held = draw(st.just(()) | st.lists(st.integers(1, 300), max_size=3).map(tuple))
        engines[number] = replace(engine, held=held, contexts=engine.contexts + held)
        share = draw(st.sampled_from((0.0, 0.0, 0.01, 0.5, 0.99, 1.0))) if held else 0.0
        if share:
            calls = share * len(held)
            passed[f"{number}"] = OvertakenInLine(calls, draw(st.sampled_from((share, share / 10))))
            passed_calls += calls
    return engines, Overtaken(passed, passed_calls / len(engines))


@given(
    chosen=fleets(),
    slowness=st.lists(st.sampled_from((0.3, 1.0, 1.2, 4.0)), min_size=15, max_size=15),
    slo=st.sampled_from((None, None, Slo(ttft_s=0.2), Slo(ttft_s=0.01), Slo(jct_s=0.5), Slo(jct_s=0.02))),
    turn=st.integers(0, 14),
    prompt=st.sampled_from(("prefix", "preface", "other", "p")),
)
def test_the_best_of_all_engines_is_chosen_if_it_is_a_candidate(
    chosen: tuple[list[Engine], Overtaken], slowness: list[float], slo: Slo | None, turn: int, prompt: str
) -> None:
    engines, overtaken = chosen
    fleet = situation(*engines, prompt=prompt, turn=turn)._replace(overtaken=overtaken, coming=lambda: COMING)
    for view, slow in zip(fleet.engines, slowness, strict=False):
        view.slowness = slow
        view.use_report(view.batch_tokens, urgent_first=slow == 0.3)
    call = call_of(prompt)._replace(slo=slo, arrived_s=fleet.now_s)
    asked = CallToPlace.of(call, fleet)
    ranks = {view.engine_id: offer(asked, fleet, view).rank for view in fleet.engines}
    few = {view.engine_id for view in candidates(asked, fleet, fleet.engines, FEW)}
    assert min(FEW, len(engines)) <= len(few) <= 2 * FEW
    found = least_delay(call, fleet)
    if len(engines) > SMALL:
        assert ranks[found.engine_id] == pytest.approx(min(ranks[engine_id] for engine_id in few))
    every = least_delay(call, fleet._replace(compares_all=True))
    assert ranks[every.engine_id] == pytest.approx(min(ranks.values()))
    if len(engines) <= SMALL or every.engine_id in few:
        assert ranks[found.engine_id] == pytest.approx(ranks[every.engine_id])


def found(fleet: Situation, prompt: str = "prefix") -> set[int]:
    asked = CallToPlace.of(call_of(prompt), fleet)
    return {int(view.engine_id) for view in candidates(asked, fleet, fleet.engines, FEW)}


def busy(calls: int, cached: str = "") -> Engine:
    return Engine(cached, waiting=(50,) * calls, contexts=(50,) * calls)


def test_the_least_busy_and_those_with_the_most_of_the_prompt() -> None:
    fleet = situation(
        *(busy(9, "prefix") for _ in range(2)),
        *(busy(calls, "pre") for calls in (8, 7, 6, 5)),
        *(busy(calls, "other") for calls in (4, 3, 2, 1, 0)),
    )
    assert found(fleet) == {0, 1, 5, 8, 9, 10}


def test_of_many_engines_with_the_prompt_the_least_busy() -> None:
    fleet = situation(*(busy(calls, "prefix") for calls in range(12)), *(busy(0) for _ in range(4)))
    assert found(fleet) == {0, 1, 2, 12, 13}


def test_a_slow_engine_is_busier_with_the_same_prompts() -> None:
    fleet = situation(*(busy(1) for _ in range(9)))
    for view in fleet.engines[:5]:
        view.slowness = 3.0
    assert found(fleet) == {5, 6, 7}


def test_of_idle_engines_the_fast_ones() -> None:
    fleet = situation(*(Engine() for _ in range(9)))
    slow = replace(COSTS, efficiency=COSTS.efficiency / 3)
    for view in fleet.engines[:6]:
        view.cost_model = slow
    assert found(fleet) == {6, 7, 8}


def test_an_engine_without_prefix_caching_has_nothing_of_the_prompt() -> None:
    fleet = situation(*(busy(0) for _ in range(3)), *(busy(calls, "prefix") for calls in (1, 2, 3, 4)))
    for view in fleet.engines[3:6]:
        view.residency.finds_nothing = True
    assert 6 in found(fleet)


def test_prompts_that_the_call_passes_make_no_engine_busy() -> None:
    fleet = situation(*(Engine(held=(300,)) for _ in range(4)), *(busy(1) for _ in range(5)))
    assert found(fleet) == {4, 5, 6}
    passed = {f"{number}": OvertakenInLine(1, 1.0) for number in range(4)}
    assert found(fleet._replace(overtaken=Overtaken(passed, 1.0))) == {0, 1, 2}


def test_an_urgent_call_waits_for_urgent_prompts_only_where_those_go_first() -> None:
    fleet = situation(*(busy(3) for _ in range(4)), *(busy(1) for _ in range(5)))
    for view in fleet.engines[:4]:
        view.use_report(view.batch_tokens, urgent_first=True)
    asked = CallToPlace.of(call_of("p")._replace(slo=Slo(ttft_s=9.0)), fleet)
    assert [view.engine_id for view in candidates(asked, fleet, fleet.engines, FEW)] == ["0", "1", "2"]


def test_prompts_that_a_timer_ends_make_no_engine_busy() -> None:
    """Without streaming, no first token says that a prompt is computed."""
    fleet = situation(*(Engine() for _ in range(4)), *(busy(1) for _ in range(5)))
    for view in fleet.engines[:4]:
        view.queue.send(Prefill(300, 0.3, 0.0, 0.0, is_streamed=False), 0.0)
    assert found(fleet) == {4, 5, 6}
    assert found(fleet._replace(now_s=0.4)) == {0, 1, 2}


def repaid(fleet: Situation, few: list[int]) -> list[float]:
    asked = CallToPlace.of(call_of("prefix"), fleet)
    offers: list[Offer] = [offer(asked, fleet, fleet.engines[number]) for number in few]
    repay_copies(asked, fleet, offers)
    return [one.cost.repaid_s for one in offers]


def test_a_copy_is_shared_with_the_engines_that_have_the_prompt_and_are_not_compared() -> None:
    engines = [busy(8, "prefix"), *(busy(9, "prefix") for _ in range(5)), Engine(), Engine()]
    all_of_it = repaid(used(situation(*engines), 50), list(range(8)))
    assert all_of_it[:6] == [0.0] * 6
    assert all_of_it[6] == all_of_it[7] > 0.0
    assert repaid(used(situation(*engines), 50), [0, 6]) == pytest.approx([0.0, all_of_it[6]])
    assert repaid(used(situation(*engines[:1], *engines[6:]), 50), [0, 1])[1] == pytest.approx(3.5 * all_of_it[6])
    assert repaid(situation(*engines), [0, 6]) == [0.0, 0.0], "nobody asks for it"


def test_an_explanation_compares_all_engines() -> None:
    fleet = situation(*(busy(calls) for calls in range(20)))
    call = call_of("prefix")
    few, every = (least_delay(call, fleet._replace(compares_all=is_whole)).compared for is_whole in (False, True))
    assert few is not None
    assert every is not None
    assert (len(few.candidates), few.engines) == (FEW, 20)
    assert (len(every.candidates), every.engines) == (20, 20)
    costs_s = [one.cost.total_s for one in every.candidates]
    assert costs_s == sorted(costs_s)
    assert costs_s[-1] < inf
