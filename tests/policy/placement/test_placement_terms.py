"""What an objective and an application add to E2's comparison, term by term, with numbers to check by hand.

An iteration takes 10 ms and 1 ms a new token, so the pivot is at 90 tokens in 100 ms. At 40 ms a token, 30 tokens fit
an iteration: 750 tokens a second where 900 are possible, a ratio of 5/6. Every call is expected to generate 10 tokens,
which take 110 ms alone; a prompt of 90 tokens takes 100 ms, so a call takes 210 ms.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.harm import DEFAULT_TPOT_S, harm_s
from plait.policy.placement.load import LoadLedger
from plait.policy.placement.outstanding import Work
from plait.policy.placement.policies import Situation, e2
from plait.policy.placement.reservation import NOTHING_RESERVED, Reservation
from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.programs.objectives_slo import LATENCY_SLO
from plait.policy.types import Call, Objective, Placement, PlacementReason, Slo, TaskGroup

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT
SHORTEST_S = 0.010 + 0.001

LATENCY_WORK = Work(LATENCY, prefill_s=0.050, decode_s=0.110)
THROUGHPUT_WORK = Work(THROUGHPUT, decode_s=1.0)


class Fleet:
    """Engines by name, each with the load of its window in milliseconds: a call that is expected to generate 10."""

    def __init__(self, **load_ms: int) -> None:
        self.tree = PrefixTree()
        self.views: dict[str, EngineView] = {}
        for name, load in load_ms.items():
            ledger, residency = LoadLedger(COSTS, prior_output_tokens=10), Residency(name, self.tree)
            ledger.book(self.tree.root, load - 10 - 110, 0, 0.0)
            assert ledger.window_cost_s() == pytest.approx(load / 1000)
            self.views[name] = EngineView(name, COSTS, ledger, residency)

    def runs(self, engine: str, *works: Work) -> Fleet:
        """An engine has outstanding work."""
        for work in works:
            self.views[engine].work.add(work)
        return self

    def holds(self, engine: str, prompt: str) -> Fleet:
        """An engine has a prefix in its cache."""
        self.views[engine].residency.resident.store(None, hashes(prompt))
        return self

    def place(self, call: Call) -> Placement:
        return e2(call, self.situation(call))

    def situation(self, call: Call) -> Situation:
        return Situation(self.tree.match(call.block_hashes), list(self.views.values()), 0)

    def harm_ms(self, call: Call, engine: str) -> float:
        prefill_s = COSTS.prefill_time_s(call.prompt_tokens)
        return harm_s(call, self.views[engine], call.prompt_tokens, prefill_s) * 1000


def hashes(prompt: str) -> array[int]:
    """A block for each letter."""
    return chain([ord(letter) for letter in prompt], 1, 0)


def call_of(
    prompt: str = "ninetoken",
    objective: Objective | None = None,
    *,
    application: str | None = None,
    group: TaskGroup | None = None,
    slo: Slo | None = None,
) -> Call:
    """Ten tokens for each letter."""
    tokens = 10 * len(prompt)
    return Call("c", "m", tokens, 10, hashes(prompt), slo, objective, application=application, group=group)


# Harm.


def test_calls_are_taken_to_be_promised_what_deduced_ones_are() -> None:
    assert LATENCY_SLO.tpot_s == DEFAULT_TPOT_S


@pytest.mark.parametrize(
    ("works", "slo", "harm_ms"),
    [
        ((), None, 0),
        ((THROUGHPUT_WORK,), None, 210 / 6),  # it lasts longer than the call: a sixth of the call's time
        ((Work(THROUGHPUT, prefill_s=0.1),), None, 100 * 0.2),  # it is done before, in 120 ms instead of 100
        ((THROUGHPUT_WORK, LATENCY_WORK), None, 0),  # its capacity is cut already
        ((Work(application="x"),), None, 0),  # nothing was said of that work
        ((THROUGHPUT_WORK,), Slo(tpot_s=0.1), 0),  # such iterations are the pivot's
        ((THROUGHPUT_WORK,), Slo(tpot_s=0.020), 210 * (1 - 500 / 900)),  # 10 tokens in 20 ms
        ((THROUGHPUT_WORK,), Slo(ttft_s=1.0), 210 / 6),
    ],
)
def test_a_latency_call_delays_throughput_work(works: tuple[Work, ...], slo: Slo | None, harm_ms: float) -> None:
    fleet = Fleet(a=200).runs("a", *works)
    assert fleet.harm_ms(call_of(objective=LATENCY, slo=slo), "a") == pytest.approx(harm_ms)


@pytest.mark.parametrize(
    ("works", "harm_ms"),
    [
        ((), 0),
        ((THROUGHPUT_WORK,), 0),
        ((LATENCY_WORK,), 160 / 6 + 100),  # slowed until the latency work has ended, which waits for its prefill
        ((Work(LATENCY, decode_s=6.0),), 210 * 0.2 + 100),  # slowed as long as it lasts
        ((Work(LATENCY, decode_s=0.06),), 60 / 6 + 60),  # what ends soon cannot be held up for longer
    ],
)
@pytest.mark.parametrize("in_a_group", [False, True])
def test_a_throughput_call_is_slowed_by_latency_work_and_holds_it_up(
    works: tuple[Work, ...], harm_ms: float, in_a_group: bool
) -> None:
    call = call_of(objective=THROUGHPUT)
    if in_a_group:
        call = call_of(objective=LATENCY, group=TaskGroup("g", 3))
    assert Fleet(a=200).runs("a", *works).harm_ms(call, "a") == pytest.approx(harm_ms)


@pytest.mark.parametrize(("b", "engine"), [(200 + 34, "b"), (200 + 36, "a")])
def test_a_latency_call_avoids_the_engine_with_throughput_work(b: int, engine: str) -> None:
    fleet = Fleet(a=200, b=b).runs("a", THROUGHPUT_WORK)  # harm 35 ms on a
    placement = fleet.place(call_of(objective=LATENCY))
    assert placement.engine_id == engine
    assert placement.cost is not None
    assert placement.cost.harm_s == pytest.approx(0.035 if engine == "a" else 0)
    assert placement.cost.total_s == pytest.approx(0.300 + (0.035 if engine == "a" else 0.034))
    assert fleet.place(call_of()).engine_id == "a", "a call without an objective goes by load"


@pytest.mark.parametrize(("b", "engine"), [(200 + 126, "b"), (200 + 127, "a")])
def test_throughput_work_avoids_the_engine_with_latency_work(b: int, engine: str) -> None:
    fleet = Fleet(a=200, b=b).runs("a", LATENCY_WORK)  # harm 126.67 ms on a
    assert fleet.place(call_of(objective=THROUGHPUT)).engine_id == engine
    assert fleet.place(call_of(objective=LATENCY)).engine_id == "a", "where latency work is, more of it costs nothing"


def test_a_cached_prefix_is_exploited_in_spite_of_less_harm_than_it_saves() -> None:
    fleet = Fleet(a=900, b=200).holds("a", "nineto").runs("a", THROUGHPUT_WORK)  # 60 ms saved, (40 + 110) / 6 harm
    placement = fleet.place(call_of(objective=LATENCY))
    assert (placement.engine_id, placement.reason) == ("a", PlacementReason.EXPLOIT)


def test_a_prefix_is_not_worth_exploiting_where_the_harm_is_greater() -> None:
    fleet = Fleet(a=200, b=220).holds("a", "two").runs("a", THROUGHPUT_WORK)  # 30 of 40 tokens: 20 + 110 ms / 6 > 20
    tight = call_of("twos", LATENCY, slo=Slo(tpot_s=0.020))  # here 130 ms x 4/9 = 57.8 ms against 30 saved
    placement = fleet.place(tight)
    assert (placement.engine_id, placement.reason) == ("b", PlacementReason.EXPLORE)
    assert fleet.place(call_of("twos", LATENCY)).engine_id == "a", "130 ms / 6 = 21.7 ms"
    assert fleet.place(call_of("twos")).reason is PlacementReason.EXPLOIT


# Application.


@pytest.mark.parametrize(("b", "engine"), [(200, "b"), (210, "b"), (212, "a")])
def test_an_application_stays_together_where_that_costs_less_than_an_iteration(b: int, engine: str) -> None:
    fleet = Fleet(a=200, b=b).runs("b", Work(application="x"))
    assert fleet.place(call_of(application="x")).engine_id == engine
    assert fleet.place(call_of(application="y")).engine_id == "a"
    assert fleet.place(call_of()).engine_id == "a"


def test_calls_of_an_application_go_where_a_call_on_its_way_brings_their_prefix() -> None:
    fleet = Fleet(a=900, b=200)
    fleet.views["a"].residency.book(fleet.tree.insert(hashes("ninetok")))
    placement = fleet.place(call_of(application="x"))
    assert (placement.engine_id, placement.reason) == ("a", PlacementReason.EXPLOIT)
    assert placement.cached_tokens == 70


WORKS = st.lists(
    st.builds(
        Work,
        st.none() | st.sampled_from(Objective),
        st.sampled_from((None, "x")),
        *(st.floats(0, 2), st.floats(0, 2), st.just(100.0)),
    ),
    max_size=4,
)
ENGINES = st.lists(st.tuples(st.integers(121, 400), WORKS, st.integers(0, 9)), min_size=1, max_size=4)


def fleet_of(engines: list[tuple[int, list[Work], int]], *, with_work: bool = True) -> Fleet:
    fleet = Fleet(**{f"e{number}": load for number, (load, _, _) in enumerate(engines)})
    for number, (_, works, cached) in enumerate(engines):
        fleet.holds(f"e{number}", "ninetokens"[:cached])
        if with_work:
            fleet.runs(f"e{number}", *works)
    return fleet


@given(engines=ENGINES)
def test_a_call_of_which_nothing_was_said_is_placed_as_if_there_were_nothing_else(
    engines: list[tuple[int, list[Work], int]],
) -> None:
    placement = fleet_of(engines).place(call_of())
    assert placement == fleet_of(engines, with_work=False).place(call_of())
    assert placement.cost is not None
    assert (placement.cost.harm_s, placement.cost.apart_s, placement.places) == (0.0, 0.0, None)


@given(engines=ENGINES)
def test_an_application_never_stays_together_against_load(engines: list[tuple[int, list[Work], int]]) -> None:
    together, alone = fleet_of(engines).place(call_of(application="x")), fleet_of(engines).place(call_of())
    assert together.reason == alone.reason
    assert together.cost is not None
    assert alone.cost is not None
    assert together.cost.total_s - together.cost.apart_s <= alone.cost.total_s + SHORTEST_S + 1e-9


# Task groups.


def test_a_group_is_allocated_when_its_first_call_comes() -> None:
    call = call_of(objective=LATENCY, group=TaskGroup("g", 16))
    fleet = Fleet(a=200, b=200)
    for view in fleet.views.values():
        view.kv_tokens = 1_000 if view.engine_id == "a" else 600  # a call takes 90 + 10
    placement = e2(call, replace(fleet.situation(call), reservation=NOTHING_RESERVED))
    assert (placement.engine_id, placement.reason) == ("a", PlacementReason.GROUP)
    assert placement.places == {"a": 9, "b": 6}


def test_a_group_keeps_off_the_engine_with_latency_work() -> None:
    call = call_of(objective=LATENCY, group=TaskGroup("g", 2))
    situation = Fleet(a=200, b=210).runs("a", LATENCY_WORK).situation(call)
    placement = e2(call, replace(situation, reservation=NOTHING_RESERVED))
    assert (placement.engine_id, placement.places) == ("b", {"b": 1})


def test_calls_take_the_place_where_their_prefix_is() -> None:
    fleet = Fleet(a=200, b=200).holds("b", "nine")
    reserved = Reservation({"a": 2, "b": 1}, running=1)
    for prompt, engine, left in (("ninety", "b", {"a": 2}), ("twenty", "a", {"a": 1, "b": 1})):
        call = call_of(prompt, group=TaskGroup("g", 4))
        placement = e2(call, replace(fleet.situation(call), reservation=reserved))
        assert (placement.engine_id, placement.places) == (engine, left)


def test_what_is_known_to_be_shared_keeps_a_group_together() -> None:
    fleet = Fleet(a=200, b=200)
    for shared_tokens, left in ((0, {"a": 3, "b": 4}), (1_900, {"a": 7})):
        call = call_of("x" * 200, group=TaskGroup("g", 8, shared_tokens))
        placement = e2(call, replace(fleet.situation(call), reservation=NOTHING_RESERVED))
        assert (placement.engine_id, placement.places) == ("a", left)


def test_a_place_is_found_for_a_call_that_nobody_counted() -> None:
    call = call_of(group=TaskGroup("g", 2))
    situation = Fleet(a=200).situation(call)
    placement = e2(call, replace(situation, reservation=Reservation({}, running=2)))
    assert (placement.reason, placement.places) == (PlacementReason.GROUP, {})


def test_when_fewer_are_left_than_reserved_the_group_is_allocated_anew() -> None:
    call = call_of(group=TaskGroup("g", 3))
    situation = Fleet(a=900, b=200).situation(call)
    placement = e2(call, replace(situation, reservation=Reservation({"a": 5}, running=1)))
    assert (placement.engine_id, placement.places) == ("b", {"b": 1})


def test_without_a_reservation_to_decide_on_a_groups_call_is_placed_alone() -> None:
    call = call_of(group=TaskGroup("g", 3))
    placement = Fleet(a=200).place(call)
    assert (placement.reason, placement.places) == (PlacementReason.EXPLORE, None)
