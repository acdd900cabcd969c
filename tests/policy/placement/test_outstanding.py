"""Outstanding work is conserved: whatever comes and goes in whatever order, the sums are those of what is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.placement.outstanding import OutstandingWork, Work
from plait.policy.types import Objective

WORK = st.builds(
    Work,
    objective=st.none() | st.sampled_from(Objective),
    application=st.sampled_from((None, "x", "y")),
    prefill_s=st.floats(0, 10),
    decode_s=st.floats(0, 10),
    kv_tokens=st.floats(0, 1e4),
)


def test_what_has_been_computed_is_not_outstanding() -> None:
    work = OutstandingWork()
    call = Work(Objective.LATENCY, "x", prefill_s=0.25, decode_s=1.0, kv_tokens=300)
    work.add(call)
    work.add(Work(kv_tokens=50))
    assert (work.calls, work.kv_tokens, work.applications) == (2, 350, {"x": 1})
    assert work.backlogs[Objective.LATENCY].total_s == 1.25
    left = work.prefilled(call)
    assert work.backlogs[Objective.LATENCY].total_s == left.total_s == 1.0
    work.remove(left)
    assert repr(work) == "OutstandingWork(calls=1, kv_tokens=50, seconds={'latency': 0.0, 'throughput': 0.0})"
    assert not work.applications


@given(works=st.lists(WORK, max_size=8), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=40))
def test_sums_are_those_of_what_is_there(works: list[Work], steps: list[tuple[bool, int]]) -> None:
    outstanding, there = OutstandingWork(), list(works)
    for work in works:
        outstanding.add(work)
    for prefilled, which in steps:
        if not there:
            break
        work = there.pop(which % len(there))
        if prefilled:
            there.append(outstanding.prefilled(work))
        else:
            outstanding.remove(work)
        outstanding.check(there)
    for work in there:
        outstanding.remove(work)
    assert (outstanding.calls, outstanding.kv_tokens, outstanding.applications) == (0, 0.0, {})
    assert all(backlog.total_s == 0.0 for backlog in outstanding.backlogs.values())


def test_a_call_too_many_is_found() -> None:
    work = OutstandingWork()
    work.add(Work())
    with pytest.raises(AssertionError):
        work.check([])
