"""The profile of measured forward passes: the shipped file is the fit to the measurements that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import forward_profile
from benchmarks.forward_passes import Record
from benchmarks.timing.work import Group, Work
from plait.backends.profiles import load_profile

NAME = "h200-llama-8b"
KEPT = Path(forward_profile.__file__).parent / "timing" / f"{NAME}.json"


def test_the_shipped_profile_is_the_fit() -> None:
    shipped = load_profile(NAME)
    found = forward_profile.fitted(forward_profile.read(KEPT))
    assert found.profile.source == shipped.source
    assert found.profile.kv == shipped.kv
    for residual in found.residuals:
        [calls] = residual.point.iterations
        assert shipped.cost_model().iteration_time_s(calls) == pytest.approx(residual.predicted_s, rel=1e-3)


def test_what_is_held_out_is_not_fitted() -> None:
    measurements = forward_profile.read(KEPT)
    held_out = {timed.kind for timed in measurements.points if timed.held_out}
    assert held_out == {"chunk and decodes", "uneven sizes", "several prompts"}
    assert held_out.isdisjoint(timed.kind for timed in measurements.points if not timed.held_out)


def test_a_group_is_so_many_equal_calls() -> None:
    timed = forward_profile.Timed("chunk and decodes", [(1, 512, 0), (3, 1, 64)], True, [0.02, 0.022], 0.021)
    assert timed.point().iterations == (((512, 0), (1, 64), (1, 64), (1, 64)),)
    assert timed.spread == pytest.approx(0.1)


def test_a_record_has_the_median_of_its_rounds_and_is_read_by_the_fit(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    record = Record(path)
    kept = json.loads(KEPT.read_text())
    record.facts = {name: kept[name] for name in ("device", "shape", "memory")}
    work = Work("decode", (Group(8, 1, 100),))
    for seconds in ([0.2, 0.3, 0.9], [0.1, 0.1, 0.1]):
        record.add(work, seconds, ["flash"])
    [timed] = forward_profile.read(path).points
    assert timed.rounds_s == [0.3, 0.1]
    assert timed.seconds == pytest.approx(0.2)
    assert timed.groups == [(8, 1, 100)]
