"""The plugin's part of vLLM's `--additional-config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.profiles import load_profile
from backends.vllm.settings import LeverSettings, Settings, SettingsError, cost_model, parse_settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Settings()),
        ({"other": 1}, Settings()),
        (object(), Settings()),
        ({"plait": {"scheduler": "fcfs", "name": "one"}}, Settings("fcfs", "one")),
        ({"plait": {"profile": "mine.toml"}}, Settings(profile="mine.toml")),
        ({"plait": {"levers": {"chunk_tokens": 8}}}, Settings(levers=LeverSettings(chunk_tokens=8))),
    ],
)
def test_what_is_not_given_has_a_default(given: Any, expected: Settings) -> None:
    assert parse_settings(given) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"scheduler": "lifo"}, "plait.scheduler: 'lifo' is none of fcfs, hit_ratio"),
        ({"scheduler": 1}, r"\$\.scheduler"),
        ({"schedular": "fcfs"}, "schedular"),
        ({"levers": {"order": "random"}}, "order"),
        (3, "plait"),
    ],
)
def test_mistakes_are_named(given: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse_settings({"plait": given})


def test_a_profile_is_a_shipped_one_or_a_file(tmp_path: Path) -> None:
    shipped = load_profile("a6000-mistral-7b")
    path = tmp_path / "mine.toml"
    path.write_text(shipped.toml(), encoding="utf-8")
    for name in ("a6000-mistral-7b", str(path)):
        assert cost_model(Settings(profile=name)) == shipped.cost_model()
    assert cost_model(Settings()) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("h100", 'no cost profile "h100"; shipped: a100'),
        ("no.toml", "no.toml: .*No such file"),
        ("", "no cost profile"),
    ],
)
def test_a_profile_that_is_not_there_is_refused(name: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=f"plait.profile: .*{reason}"):
        cost_model(Settings(profile=name))


def test_a_bad_profile_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("efficiency = 2.0", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"plait\.profile: cost profile .*bad\.toml"):
        cost_model(Settings(profile=str(path)))
