"""Programs of tenants that reach their limits in the middle: the calls wait, and no value is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from e2e.servers import Fleet, Launcher

TENANTS: list[Mapping[str, Any]] = [
    {"name": "slow", "api_keys": ["slow"], "calls_per_s": 0.5},
    {"name": "narrow", "api_keys": ["narrow"], "max_running": 2, "max_waiting": 3},
]


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Fleet]:
    with Launcher(tmp_path) as launch:
        engine = launch.engine("demo-1")
        fleet = Fleet(launch.gateway([engine], tenants=TENANTS), {engine.name: engine})
        fleet.start()
        yield fleet


def call(number: int, *, after: int | None) -> dict[str, Any]:
    inputs = [] if after is None else [{"name": f"v{after}"}]
    text = "Begin." if after is None else f"Go on from {{{{v{after}}}}}."
    return {
        "model": "demo",
        "prompt": f"{text} {number} {{{{v{number}}}}}",
        "placeholders": [*inputs, {"name": f"v{number}", "in_out": True}],
        "max_tokens": 4,
    }


@pytest.mark.parametrize(("key", "calls", "is_chain"), [("slow", 7, True), ("narrow", 8, False)])
def test_a_program_goes_on_when_its_tenants_limits_allow_it(
    limited: Fleet, key: str, calls: int, *, is_chain: bool
) -> None:
    program = {
        "calls": [call(number, after=number - 1 if is_chain and number else None) for number in range(calls)],
        "gets": {f"v{number}": None for number in range(calls)},
    }
    answer = limited.gateway.post("/v1/programs", json=program, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    values = answer.json()["values"]
    assert set(values) == set(program["gets"])
    assert all(values.values())
    if is_chain:
        assert '"rate":' in limited.gateway.log(), "calls have waited for their tenant's rate"
    else:
        assert limited.gateway.metric("plait_refusals_total") > 0, "a limit was reached"
