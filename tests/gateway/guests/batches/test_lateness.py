"""When a batch is taken to miss its window."""

import time

import pytest

from plait.gateway.guests.batches.batch import Batch
from plait.gateway.guests.batches.running import KNOWN, LATE, Running
from plait.policy.batches.line_order import LinesLeft

WINDOW_S = 1000


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Running:
    """A batch of 100 lines that began at 0, which is now."""
    batch = Batch("batch_1", "blue", "id", "", "/v1/chat/completions", "file-1", "24h", 0, WINDOW_S)
    clock(monkeypatch, 0.0)
    return Running(batch, left=LinesLeft([b""] * 100, range(100), ["one"]))


def clock(monkeypatch: pytest.MonkeyPatch, now_s: float) -> None:
    monkeypatch.setattr(time, "time", lambda: now_s)


def test_no_batch_is_late_when_it_begins(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for now_s in (0.0, 1.0, KNOWN * WINDOW_S - 0.1):
        clock(monkeypatch, now_s)
        assert (run.is_late, run.window) == (False, now_s / WINDOW_S)
    clock(monkeypatch, KNOWN * WINDOW_S)
    assert run.is_late, "no line has ended"


def test_a_batch_is_late_by_its_rate(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 100.0)
    run.ended = int(LATE * 100 * 100 / 900)  # so that the rest would take about all that is left
    assert not run.is_late
    assert run.window == pytest.approx(0.1 + 0.9 / LATE, abs=0.05)
    run.ended -= 2
    assert run.is_late
