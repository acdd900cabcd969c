"""Annotations in `vllm_xargs`: all optional, and a bad one is as if it were not there."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends.protocol.call_annotations import AnnotationReader, Annotations
from plait.policy.types import Objective, Slo


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, Annotations()),
        ({}, Annotations()),
        ({"top_secret": 3, "plait_future": [1]}, Annotations()),
        ({"plait_age_ms": 1500}, Annotations(age_s=1.5)),
        ({"plait_age_ms": "0.5"}, Annotations(age_s=0.0005)),
        ({"plait_ttft_ms": 200}, Annotations(slo=Slo(ttft_s=0.2))),
        ({"plait_tpot_ms": 30, "plait_jct_ms": "9e3"}, Annotations(slo=Slo(tpot_s=0.03, jct_s=9.0))),
        ({"plait_objective": "throughput"}, Annotations(objective=Objective.THROUGHPUT)),
        ({"plait_priority": -3, "plait_cached_tokens": 640}, Annotations(priority=-3, cached_tokens=640)),
    ],
)
def test_what_is_understood(arguments: dict[str, Any] | None, expected: Annotations) -> None:
    reader = AnnotationReader()
    assert reader.read(arguments) == expected
    assert not reader.ignored


BAD: dict[str, list[Any]] = {
    "plait_age_ms": [-1, "soon", [1], "nan", "inf", 10**400],
    "plait_ttft_ms": [0, -5, "", {}],
    "plait_priority": [1.5, "high", float("inf"), []],
    "plait_cached_tokens": [-1, "some", 0.5],
    "plait_objective": ["speed", 1, ["latency"]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_is_ignored_counted_and_logged_once(key: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    reader = AnnotationReader()
    for _ in range(3):
        assert reader.read({key: value, "plait_jct_ms": 1000}).slo == Slo(jct_s=1.0)
    assert reader.read({key: value}) == Annotations()
    assert reader.ignored == {key: 4}
    assert len([record for record in caplog.records if key in record.getMessage()]) == 1
