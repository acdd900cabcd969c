"""Predicted against reported cached tokens: what is a drift, and when it is said."""

from __future__ import annotations

from structlog.testing import capture_logs

from plait.gateway.calls.metrics import CAUSES, LEAST_TOKENS, TELL_INTERVAL_S, Parity
from plait.gateway.fleet.booking import CallUsage


def observe(parity: Parity, calls: int, *, predicted: int, reported: int, now_s: float = 0.0) -> list[str]:
    with capture_logs() as lines:
        for _ in range(calls):
            parity.observe("m", "a", predicted, CallUsage(1_000, 1, reported), now_s)
    return [line["event"] for line in lines]


def shares(parity: Parity) -> list[float]:
    return [round(sample.value, 3) for metric in parity.collect() for sample in metric.samples]


def test_an_engine_that_never_finds_what_was_predicted_is_told_of_once_in_five_minutes() -> None:
    parity, enough = Parity(), int(LEAST_TOKENS / 1_000)
    assert observe(parity, enough - 1, predicted=896, reported=0) == []
    assert observe(parity, 100, predicted=896, reported=0) == ["cached tokens are not as predicted"]
    assert observe(parity, 1, predicted=896, reported=0, now_s=TELL_INTERVAL_S) == [
        "cached tokens are not as predicted"
    ]
    assert shares(parity) == [0.896]
    assert all(cause in CAUSES for cause in ("template", "tokenizer", "salt", "LoRA"))


def test_engines_that_agree_are_not_told_of() -> None:
    parity = Parity()
    assert observe(parity, 500, predicted=896, reported=880) == []
    assert shares(parity) == [0.016]


def test_a_drift_is_forgotten() -> None:
    parity = Parity()
    observe(parity, 100, predicted=896, reported=0)
    assert observe(parity, 100, predicted=896, reported=896, now_s=3_600.0) == []
    assert shares(parity) == [0.0]
