"""What a placement has compared, in virtual time: parts that sum to the cost, the rule, and the bound of the others."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from plait.gateway.simulation.compare import Experiment, prepare, simulate
from plait.policy.costs.delay import CallToPlace, DelayCost, Offer, offer
from plait.policy.costs.situation import Situation
from plait.policy.placement.least_delay import MOST_KEPT, ROUNDING, least_delay, with_copies
from plait.policy.placement.policies import Policy
from plait.policy.types import Call, Compared, Placement, Slo, TaskGroup

CALLS = 250
"""At each of four fleets."""

EXPERIMENT = Experiment(calls=CALLS, rate=0.9, policies=())


def all_offers(call: Call, situation: Situation) -> list[Offer]:
    """Those of all engines, in the order in which they are looked at."""
    asked, first = CallToPlace.of(call, situation), situation.turn % len(situation.engines)
    engines = [*situation.engines[first:], *situation.engines[:first]]
    offers = [offer(asked, situation, engine) for engine in engines]
    return list(
        offers if situation.siblings and asked.ttft_s == inf else with_copies(asked, situation, engines, offers)
    )


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
    """Places by the least delay, and looks at what was compared."""

    def __init__(self) -> None:
        self.rules: set[str] = set()
        self.placements = 0

    def place(self, call: Call, situation: Situation) -> Placement:
        found, others = least_delay(call, situation), variants(call, situation)
        for number in (0, 1 + situation.turn % 2, 3 + situation.turn % 2):
            self.check(*others[number])
        return found

    def check(self, call: Call, situation: Situation) -> None:
        found, more = least_delay(call, situation), least_delay(call, situation._replace(compares=MOST_KEPT))
        assert found[:-1] == more[:-1], "what is compared changes no choice"
        self.placements += 2
        assert found.compared is not None
        assert more.compared is not None
        self.rules.add(found.compared.rule)
        if found.compared.rule == "only_engine":
            assert len(situation.engines) == 1
            return
        offers = {one.engine.engine_id: one for one in all_offers(call, situation)}
        for compared in (found.compared, more.compared):
            check(compared, found, offers)
        if call.slo is None and call.group is None:
            known = sorted(candidate.cost.total_s for candidate in more.compared.candidates)[:MOST_KEPT]
            assert known == pytest.approx(sorted(one.cost.total_s for one in offers.values())[:MOST_KEPT])


def check(compared: Compared, found: Placement, offers: dict[str, Offer]) -> None:
    assert compared.engines == len(offers)
    costs_s = {engine_id: one.cost.total_s for engine_id, one in offers.items()}
    looked = {one.engine.engine_id: one.cost for one in compared.candidates}
    assert found.engine_id in looked
    for engine_id, cost in looked.items():
        assert isinstance(cost, DelayCost)
        assert sum(cost.weighted_s().values()) == pytest.approx(cost.total_s, abs=1e-9)
        assert cost.total_s == pytest.approx(costs_s[engine_id], abs=1e-9)
    for engine_id in offers.keys() - looked.keys():
        assert compared.others_s <= costs_s[engine_id] * (1 + ROUNDING)
    is_cheapest = costs_s[found.engine_id] <= min(costs_s.values()) * (1 + ROUNDING)
    assert is_cheapest or compared.rule in {"ttft", "group"}
    runner_up = compared.next_best(found.engine_id)
    if runner_up is not None:
        others = [cost_s for engine_id, cost_s in costs_s.items() if engine_id != found.engine_id]
        assert runner_up.cost.total_s <= min(others) * (1 + ROUNDING), "it is the next one, or nobody knows"


def test_the_parts_the_rule_and_the_bound_are_those_of_all_offers() -> None:
    checked = Checked()
    workload = prepare(EXPERIMENT, lambda *_: None)
    policy = Policy("checked", "checked", checked.place, keeps_sessions=True, moves_waiting=True)
    for engines in (1, 4, 8, 64):
        records = simulate(replace(EXPERIMENT, engines=engines), workload, policy, 4.0 * engines, lambda *_: None)
        assert len(records) == CALLS
    assert checked.rules == {"only_engine", "least_delay", "ttft", "group"}
    assert checked.placements >= 5_000
