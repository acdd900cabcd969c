"""Only a scheduler that measures is told how long iterations take."""

from __future__ import annotations

import pytest

from plait.backends.adapter.scheduler_settings import measuring
from plait.backends.profiles import load_profile
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import MeasuringScheduler

COSTS = load_profile("a6000-mistral-7b").cost_model()


def test_one_that_measures_expects_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, expected = SCHEDULERS["slo"](), list[CostModel]()
    assert isinstance(policy, MeasuringScheduler)
    monkeypatch.setattr(policy, "expect", expected.append)
    assert measuring(policy, None) is policy
    assert expected == []
    assert measuring(policy, COSTS) is policy
    assert expected == [COSTS]


def test_one_that_does_not_is_none() -> None:
    assert measuring(SCHEDULERS["fcfs"](), COSTS) is None
