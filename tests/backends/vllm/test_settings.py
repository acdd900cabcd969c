"""The plugin's part of vLLM's `--additional-config`."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends.adapter.scheduler_settings import SettingsError, VllmSettings, parse_settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, VllmSettings()),
        ({"other": 1}, VllmSettings()),
        (object(), VllmSettings()),
        ({"plait": {"scheduler": "fcfs", "name": "one"}}, VllmSettings("fcfs", "one")),
        ({"plait": {"profile": "mine.toml"}}, VllmSettings(profile="mine.toml")),
        (
            {"plait": {"scheduler": "a.b:C", "scheduler_options": {"d": 8}}},
            VllmSettings("a.b:C", scheduler_options={"d": 8}),
        ),
    ],
)
def test_what_is_not_given_has_a_default(given: Any, expected: VllmSettings) -> None:
    assert parse_settings(given) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"scheduler": "lifo"}, "plait.scheduler: 'lifo' is none of fcfs, hit_ratio"),
        ({"scheduler": 1}, r"\$\.scheduler"),
        ({"schedular": "fcfs"}, "schedular"),
        ({"scheduler": "slo", "scheduler_options": {"d": 8}}, "'slo' takes none"),
        (3, "plait"),
    ],
)
def test_mistakes_are_named(given: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse_settings({"plait": given})
