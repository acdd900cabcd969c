"""What every test of the gateway runs under."""

from __future__ import annotations

from math import inf

import pytest

from plait.gateway.intake import turns


@pytest.fixture(autouse=True)
def _no_work_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a test that takes 10 ms of CPU time somewhere would have to wait. Tests of turns have their own times."""
    monkeypatch.setattr(turns, "LONG_PASS_S", inf)
    monkeypatch.setattr(turns, "SLICE_S", inf)
    monkeypatch.setattr(turns, "LONG_BYTES", inf)
