"""What every engine's plugin can be told: a profile, by its name or its file; a scheduler, by its name or place."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.backends.adapter.scheduler_settings import SchedulerSettings, SettingsError, cost_model, local_scheduler
from plait.backends.profiles import load_profile
from plait.policy.scheduling.in_order import Fcfs


def test_a_profile_is_a_shipped_one_or_a_file(tmp_path: Path) -> None:
    shipped = load_profile("a6000-mistral-7b")
    path = tmp_path / "mine.toml"
    path.write_text(shipped.toml(), encoding="utf-8")
    for name in ("a6000-mistral-7b", str(path)):
        assert cost_model(SchedulerSettings(profile=name), "here") == shipped.cost_model()
    assert cost_model(SchedulerSettings(), "here") is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("h100", 'no cost profile "h100"; give one of a100'),
        ("no.toml", "no.toml: .*No such file"),
        ("", "no cost profile"),
    ],
)
def test_a_profile_that_is_not_there_is_refused(name: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=f"here.profile: .*{reason}"):
        cost_model(SchedulerSettings(profile=name), "here")


def test_a_bad_profile_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("efficiency = 2.0", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"here\.profile: cost profile .*bad\.toml"):
        cost_model(SchedulerSettings(profile=str(path)), "here")


class Own(Fcfs):
    """A user's own."""

    def __init__(self, least: int = 0) -> None:
        self.least = least


OWN = f"{__name__}:Own"


def test_a_scheduler_is_a_shipped_one_or_a_users_own() -> None:
    assert type(local_scheduler(SchedulerSettings("fcfs"), "here")) is Fcfs
    made = local_scheduler(SchedulerSettings(OWN, scheduler_options={"least": 3}), "here")
    assert isinstance(made, Own)
    assert made.least == 3


@pytest.mark.parametrize(
    ("scheduler", "options", "reason"),
    [
        ("nowhere.at_all:Mine", {}, "No module named 'nowhere'"),
        (f"{__name__}:Mine", {}, "has no attribute 'Mine'"),
        (f"{__name__}:OWN", {}, "not callable"),
        (OWN, {"most": 3}, "unexpected keyword argument 'most'"),
        ("builtins:dict", {}, "makes a dict, which has no `plan`"),
        ("a b:c", {}, "invalid format"),
    ],
)
def test_an_own_scheduler_that_cannot_be_made_is_refused(scheduler: str, options: dict[str, int], reason: str) -> None:
    with pytest.raises(SettingsError, match=f"here.scheduler: .*{reason}"):
        local_scheduler(SchedulerSettings(scheduler, scheduler_options=options), "here")


@pytest.mark.parametrize(
    ("settings", "lowest"),
    [
        (SchedulerSettings(), "reports"),
        (SchedulerSettings(require="chunks"), "chunks"),
        (SchedulerSettings("slo"), "order"),
        (SchedulerSettings(OWN, require="reports"), "order"),
        (SchedulerSettings("slo", require="chunks"), "chunks"),
    ],
)
def test_a_scheduler_that_is_named_has_to_order(settings: SchedulerSettings, lowest: str) -> None:
    assert settings.lowest_tier == lowest
