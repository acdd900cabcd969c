"""What lines of batches leave to other calls of their tenant."""

from __future__ import annotations

import pytest

from plait.backends.errors import LimitError
from plait.gateway.admission.tenants import BURST_S, TenantLimits
from tests.gateway.admission.waiting_fleet import WaitingFleet


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("lines", [1, 4])
def test_a_place_that_a_line_leaves_is_that_of_a_call_that_waits_for_it(lines: int, ends: bool) -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_running=lines))
    entered = [fleet.enter(is_line=True) for _ in range(max(1, lines - 1))]
    first, second = (fleet.enter() for _ in range(2))
    assert (first.booking is None, second.booking) == (lines == 1, None)
    for line in entered[:2]:
        fleet.end(line) if ends else fleet.go(line)
    assert first.booking is not None
    assert (second.booking is None) == (lines == 1)


def test_lines_leave_a_place_to_other_calls() -> None:
    fleet = WaitingFleet("x", limits=TenantLimits(max_running=3))
    for _ in range(2):
        fleet.enter(is_line=True)
    with pytest.raises(LimitError, match="As many calls of this tenant run"):
        fleet.enter(is_line=True)
    assert fleet.enter().booking is not None


def test_lines_leave_half_of_a_rate_to_other_calls() -> None:
    bucket = int(BURST_S * 2)
    fleet = WaitingFleet("x", limits=TenantLimits(calls_per_s=2.0))
    for _ in range(bucket // 2):
        fleet.enter(is_line=True)
    with pytest.raises(LimitError, match="2 calls a second"):
        fleet.enter(is_line=True)
    for _ in range(bucket // 2):
        fleet.enter()
    with pytest.raises(LimitError, match="2 calls a second"):
        fleet.enter()
