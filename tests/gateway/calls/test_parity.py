"""Predicted against reported cached tokens."""

from __future__ import annotations

import pytest

from plait.gateway.calls.metrics import Parity
from plait.gateway.fleet.booking import CallUsage


def observe(parity: Parity, calls: int, *, predicted: int, reported: int, now_s: float = 0.0) -> list[float]:
    """The wrongly predicted share after these calls."""
    for _ in range(calls):
        parity.observe("m", "a", predicted, CallUsage(1_000, 1, reported), now_s)
    return [round(sample.value, 3) for metric in parity.collect() for sample in metric.samples]


@pytest.mark.parametrize(("reported", "share"), [(0, 0.896), (880, 0.016), (896, 0.0)])
def test_the_share_is_of_the_prompts_tokens(reported: int, share: float) -> None:
    assert observe(Parity(), 100, predicted=896, reported=reported) == [share]


def test_a_difference_is_forgotten() -> None:
    parity = Parity()
    observe(parity, 100, predicted=896, reported=0)
    assert observe(parity, 100, predicted=896, reported=896, now_s=3_600.0) == [0.0]
