"""What the plugin's settings choose, and which it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from e2e.real_schedulers.built_engine import MAX_RUNNING_CALLS, Build
from e2e.real_schedulers.plans import forced
from plait.backends.adapter.scheduler_settings import SettingsError
from plait.backends.profiles import load_profile
from plait.policy.scheduling.lines import LinesLast
from plait.policy.scheduling.plan import IterationWork
from plait.policy.scheduling.slo_scheduler import SloScheduler


def test_a_profile_is_expected_from_the_start(build: Build) -> None:
    engine = build(plait={"scheduler": "slo", "profile": "a6000-mistral-7b"})
    policy = engine.policy
    assert isinstance(policy, LinesLast)
    assert policy.model.costs == load_profile("a6000-mistral-7b").cost_model()


def test_the_engines_own_limit_of_calls_is_reported(build: Build) -> None:
    assert build().report(None, None).scheduler.slots == MAX_RUNNING_CALLS


def test_a_scheduler_behind_levers_measures(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[IterationWork] = []
    monkeypatch.setattr(SloScheduler, "observe", lambda _self, _duration_s, work: seen.append(work))
    engine = build(plait=forced("slo", chunk_tokens=32))
    engine.add(list(range(50)), 3, name="a")
    engine.run()
    assert seen[:2] == [IterationWork.of([32], [0]), IterationWork.of([18], [32])]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"scheduler": "sjf"}, "'sjf' is none of fcfs"),
        ({"schedular": "fcfs"}, "schedular"),
        ({"scheduler_options": 3}, "scheduler_options"),
        ({"scheduler": "fcfs", "scheduler_options": {"chunk_tokens": 32}}, "'fcfs' takes none"),
        ({"scheduler": "nowhere.at_all:mine"}, "nowhere"),
        ({"scheduler": "slo", "profile": "nowhere"}, r"profile: .*nowhere"),
        ({"scheduler": "fcfs", "profile": "nowhere"}, r"profile: .*nowhere"),
    ],
)
def test_wrong_settings_are_refused(build: Build, settings: Mapping[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        build(plait=settings)
