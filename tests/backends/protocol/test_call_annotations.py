"""Annotations in `vllm_xargs`: all optional, and a bad one is as if it were not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.call_annotations import AnnotationReader, EngineAnnotations, to_parameters
from plait.policy.types import Objective, Slo


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, EngineAnnotations()),
        ({}, EngineAnnotations()),
        ({"top_secret": 3, "plait_future": [1]}, EngineAnnotations()),
        ({"plait_age_ms": 1500}, EngineAnnotations(age_s=1.5)),
        ({"plait_age_ms": "0.5"}, EngineAnnotations(age_s=0.0005)),
        ({"plait_ttft_ms": 200}, EngineAnnotations(slo=Slo(ttft_s=0.2))),
        ({"plait_tpot_ms": 30, "plait_jct_ms": "9e3"}, EngineAnnotations(slo=Slo(tpot_s=0.03, jct_s=9.0))),
        ({"plait_objective": "throughput"}, EngineAnnotations(objective=Objective.THROUGHPUT)),
        ({"plait_priority": -3, "plait_cached_tokens": 640}, EngineAnnotations(priority=-3, cached_tokens=640)),
    ],
)
def test_what_is_understood(arguments: dict[str, Any] | None, expected: EngineAnnotations) -> None:
    reader = AnnotationReader()
    assert reader.read(arguments) == expected
    assert not reader.ignored


BAD: dict[str, list[Any]] = {
    "plait_age_ms": [-1, "soon", [1], "nan", "inf", 10**400],
    "plait_ttft_ms": [0, -5, "", {}],
    "plait_tpot_ms": [-0.0, "1e-400", "0x10"],
    "plait_jct_ms": [float("nan"), "-inf", [[]]],
    "plait_priority": [1.5, "high", float("inf"), []],
    "plait_cached_tokens": [-1, "some", 0.5],
    "plait_objective": ["speed", 1, ["latency"]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_is_ignored_counted_and_logged_once(key: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    reader = AnnotationReader()
    for _ in range(3):
        assert reader.read({"plait_other": 1, key: value}) == EngineAnnotations()
    assert reader.ignored == {key: 3}
    assert len([record for record in caplog.records if key in record.getMessage()]) == 1


def seconds(least_us: int) -> st.SearchStrategy[float]:
    """Whole microseconds, which is as fine as times travel, up to a year."""
    return st.integers(least_us, 365 * 86_400 * 10**6).map(lambda microseconds: microseconds / 1e6)


objectives_s = st.none() | seconds(least_us=1)
times_s = st.tuples(objectives_s, objectives_s, objectives_s)
writable = st.builds(
    EngineAnnotations,
    age_s=seconds(least_us=0),
    slo=st.builds(
        lambda given, said: Slo(*given)._replace(is_deduced=said) if any(given) else None, times_s, st.booleans()
    ),
    objective=st.none() | st.sampled_from(Objective),
    priority=st.integers(-(2**31), 2**31 - 1),
    cached_tokens=st.none() | st.integers(0, 2**31),
)


def in_microseconds(said: EngineAnnotations) -> EngineAnnotations:
    """As exact as times travel: what is read differs from what was written by a rounding error of floats."""
    slo = said.slo and Slo(*(time_s and round(time_s * 1e6) for time_s in said.slo[:3]), said.slo.is_deduced)  # type: ignore[call-arg,arg-type]
    return replace(said, age_s=round(said.age_s * 1e6), slo=slo)


@given(writable)
def test_what_is_written_is_read(said: EngineAnnotations) -> None:
    reader = AnnotationReader()
    on_the_wire = msgspec.json.decode(msgspec.json.encode(to_parameters(said)))
    read = reader.read(on_the_wire)
    assert in_microseconds(read) == in_microseconds(said)
    assert to_parameters(read) == on_the_wire, "and so often as it is passed on"
    assert not reader.ignored


@given(writable, st.sampled_from(list(BAD)), st.data())
def test_a_bad_value_among_good_ones_takes_away_only_its_own(
    said: EngineAnnotations, key: str, data: st.DataObject
) -> None:
    reader = AnnotationReader()
    written = to_parameters(said)
    bad = {**written, key: data.draw(st.sampled_from(BAD[key]))}
    written.pop(key, None)
    assert reader.read(bad) == AnnotationReader().read(written)
    assert reader.ignored == {key: 1}


numbers = st.integers() | st.floats()
anything = st.recursive(
    st.none() | st.booleans() | numbers | numbers.map(str) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(list(BAD)), anything))
def test_whatever_comes_is_understood_or_counted(arguments: dict[str, Any]) -> None:
    reader = AnnotationReader()
    read = reader.read(arguments)
    understood = {key for key, value in arguments.items() if value is not None} - reader.ignored.keys()
    assert to_parameters(read).keys() - {"plait_age_ms"} <= understood, "nothing is made up"
    assert set(reader.ignored.values()) <= {1}
    assert reader.read({key: arguments[key] for key in understood}) == read, (
        "what was ignored is as if it were not there"
    )
