"""Each key of the configuration with values of each type of TOML: taken, or refused in words."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from plait.gateway.config.file import ConfigError, parse_config
from plait.gateway.config.section import Section
from plait.gateway.config.sections import Config

VALUES: list[Any] = [
    *("x", "", "ü", "a\nb", 1, 0, -1, 10**30, 1.5, float("nan"), True, [], ["x"], [1], [[]], [{}], {}, {"a": 1}),
    *(dt.date(2020, 1, 1), dt.time(1)),
]
SECTIONS = {field.name: field.type for field in msgspec.structs.fields(Config)}
OTHERS = {"name": "n", "url": "http://b:1", "api_keys": ["k"]}
"""What arrays of tables need beside a key."""


def sections_of(kind: Any) -> Iterator[type[Section]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in get_args(kind):
        yield from sections_of(part)


def problems(data: dict[str, Any]) -> list[str]:
    try:
        parse_config({"engines": [{"url": "http://a:1"}], **data}, "c.toml")
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("section", SECTIONS)
def test_no_value_of_a_wrong_type_is_a_defect(section: str) -> None:
    kind = SECTIONS[section]
    for value in VALUES:
        assert all(section in problem for problem in problems({section: value}) if value not in ([], {}))
    for one in sections_of(kind):
        for key in one.__struct_fields__:
            for value in VALUES:
                others = {name: given for name, given in OTHERS.items() if name in one.__struct_fields__}
                table = {key: value} if one is kind else {**others, key: value}
                found = problems({section: table if one is kind else [table]})
                assert all(problem.startswith("c.toml: ") and len(problem) < 1_000 for problem in found)


def test_a_switch_takes_true_or_false() -> None:
    assert problems({"admission": {"sessions": "yes"}}) == [
        'c.toml: admission.sessions = "yes": expected true or false'
    ]
