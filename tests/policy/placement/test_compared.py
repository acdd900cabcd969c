"""What a placement has compared, in virtual time: parts that sum to the cost, the rule, and the next best engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import pytest

from plait.lab.simulation.compare import Experiment, prepare, simulate
from plait.policy.costs.delay import CallToPlace, DelayCost, Offer, offer
from plait.policy.costs.situation import Situation
from plait.policy.placement.least_delay import SMALL, least_delay, repay_copies
from plait.policy.placement.policies import Policy
from plait.policy.types import Call, Compared, ComparedEngine, Cost, Placement, Slo, TaskGroup

CALLS = 250
"""At each of four fleets."""

EXPERIMENT = Experiment(calls=CALLS, rate=0.9, policies=())


def all_offers(call: Call, situation: Situation) -> dict[str, Offer]:
    """Those of all engines."""
    asked = CallToPlace.of(call, situation)
    offers = [offer(asked, situation, engine) for engine in situation.engines]
    if not situation.siblings or asked.ttft_s < inf:
        repay_copies(asked, situation, offers)
    return {one.engine.engine_id: one for one in offers}


def variants(call: Call, situation: Situation) -> list[tuple[Call, Situation]]:
    """The call as it is, with two TTFTs, a JCT, and as one of a task group."""
    group = TaskGroup("g", 12)
    slos = [Slo(ttft_s=0.2), Slo(ttft_s=2.0), Slo(jct_s=1.5)]
    return [
        (call, situation),
        *((call._replace(slo=slo, arrived_s=situation.now_s), situation) for slo in slos),
        (call._replace(group=group), situation._replace(siblings=11)),
    ]


class Checked:
    """Places by the least delay, and looks at what was compared. `costs_s`: of the chosen and of the best engines."""

    def __init__(self) -> None:
        self.rules: set[str] = set()
        self.placements = 0
        self.costs_s = [0.0, 0.0]

    def place(self, call: Call, situation: Situation) -> Placement:
        found, others = least_delay(call, situation), variants(call, situation)
        for number in (0, 1 + situation.turn % 2, 3 + situation.turn % 2):
            self.check(*others[number])
        return found

    def check(self, call: Call, situation: Situation) -> None:
        found, every = least_delay(call, situation), least_delay(call, situation._replace(compares_all=True))
        self.placements += 2
        assert found.compared is not None
        assert every.compared is not None
        self.rules.add(found.compared.rule)
        if found.compared.rule == "only_engine":
            assert len(situation.engines) == 1
            return
        offers = all_offers(call, situation)
        check(every.compared, every, offers)
        assert {one.engine.engine_id for one in every.compared.candidates} == offers.keys()
        if len(situation.engines) <= SMALL:
            assert found[:-1] == every[:-1], "a small fleet is compared whole"
            return
        check(found.compared, found, {one.engine.engine_id: one for one in found.compared.candidates})
        for one in found.compared.candidates:
            assert unpaid_s(one.cost) == pytest.approx(unpaid_s(offers[one.engine.engine_id].cost), abs=1e-9)
        if call.slo is None and call.group is None:
            for number, placement in enumerate((found, every)):
                self.costs_s[number] += offers[placement.engine_id].cost.total_s


def unpaid_s(cost: Cost) -> float:
    """The cost without what a copy repays, which depends on the engines that are compared."""
    assert isinstance(cost, DelayCost)
    return cost.total_s + cost.repaid_s


def check(compared: Compared, found: Placement, offers: Mapping[str, ComparedEngine]) -> None:
    """Compare with the offers: the best one was taken, and the next is the best of the others."""
    costs_s = {engine_id: one.cost.total_s for engine_id, one in offers.items()}
    looked = {one.engine.engine_id: one.cost for one in compared.candidates}
    assert found.engine_id in looked
    assert len(looked) <= compared.engines
    for engine_id, cost in looked.items():
        assert cost.total_s == pytest.approx(costs_s[engine_id], abs=1e-9)
    assert costs_s[found.engine_id] == pytest.approx(min(costs_s.values())) or compared.rule in {"ttft", "group"}
    runner_up = compared.next_best
    others = [cost_s for engine_id, cost_s in costs_s.items() if engine_id != found.engine_id]
    assert (runner_up is None) is (not others)
    assert runner_up is None or runner_up.cost.total_s == pytest.approx(min(others))


def test_the_parts_the_rule_and_the_next_engine_are_those_of_the_offers() -> None:
    checked = Checked()
    workload = prepare(EXPERIMENT, lambda *_: None)
    policy = Policy("checked", "checked", checked.place, keeps_sessions=True, moves_waiting=True)
    for engines in (1, 4, 8, 64):
        records = simulate(replace(EXPERIMENT, engines=engines), workload, policy, 4.0 * engines, lambda *_: None)
        assert len(records) == CALLS
    assert checked.rules == {"only_engine", "least_delay", "ttft", "group"}
    assert checked.placements >= 5_000
    chosen_s, best_s = checked.costs_s
    assert best_s <= chosen_s <= 1.01 * best_s
