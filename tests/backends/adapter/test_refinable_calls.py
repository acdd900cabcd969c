"""Changes of objectives find the calls of an engine, in whatever order they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.adapter.state_reporter import EARLY_CHANGES, Attainment, RefinableCalls
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Objective, Slo
from tests.invariants import check

LATENCY = EngineAnnotations(slo=Slo(ttft_s=1.0, tpot_s=0.04), objective=Objective.LATENCY, handle="h")


def local_call(name: str) -> LocalCall:
    return LocalCall(name, 0.0, 10)


def test_a_change_replaces_the_objectives_of_its_calls() -> None:
    calls, one, other = RefinableCalls(), local_call("one"), local_call("other")
    other.slo, other.objective = Slo(jct_s=9.0), Objective.LATENCY
    calls.received("one", one, "h")
    calls.received("other", other, "h2")
    assert calls.refine([LATENCY, EngineAnnotations(handle="h2"), EngineAnnotations(handle="h3")]) == 2
    assert (one.slo, one.objective) == (LATENCY.slo, Objective.LATENCY)
    assert [other.slo, other.objective] == [None, None]


def test_every_completion_of_a_request_gets_it() -> None:
    calls, choices = RefinableCalls(), [local_call("0"), local_call("1")]
    for choice in choices:
        calls.received(choice.call_id, choice, "h")
    assert calls.refine([LATENCY]) == 1
    assert [choice.slo for choice in choices] == [LATENCY.slo] * 2


def test_a_change_may_come_before_its_call() -> None:
    calls, choices = RefinableCalls(), [local_call("0"), local_call("1")]
    assert calls.refine([LATENCY]) == 0
    for choice in choices:
        calls.received(choice.call_id, choice, "h")
    assert [choice.slo for choice in choices] == [LATENCY.slo] * 2
    later = EngineAnnotations(slo=Slo(jct_s=5.0), handle="h")
    calls.refine([later])
    third = local_call("2")
    calls.received("2", third, "h")
    assert third.slo == later.slo, "the newest counts"


def test_an_early_change_is_forgotten_with_its_call() -> None:
    calls, again = RefinableCalls(), local_call("again")
    calls.refine([LATENCY])
    calls.received("a", local_call("a"), "h")
    calls.ended("a")
    calls.received("again", again, "h")
    assert again.slo is None, "the call was sent again with objectives of its own"


def test_early_changes_are_few() -> None:
    calls = RefinableCalls()
    for number in range(2 * EARLY_CHANGES):
        calls.refine([EngineAnnotations(slo=LATENCY.slo, handle=str(number))])
    check(calls)
    first, last = local_call("first"), local_call("last")
    calls.received("first", first, "0")
    calls.received("last", last, str(2 * EARLY_CHANGES - 1))
    assert (first.slo, last.slo) == (None, LATENCY.slo)


handles = st.sampled_from([None, "h", "i"])
events = st.lists(
    st.tuples(st.sampled_from(["received", "ended", "retain", "refine"]), st.integers(0, 4), handles, st.integers(1, 9))
)


@given(events)
def test_a_call_has_the_newest_objectives_that_were_said_of_it(said: list[tuple[str, int, str | None, int]]) -> None:
    calls, present, expected = RefinableCalls(), dict[int, tuple[LocalCall, str | None]](), dict[int, Slo | None]()
    early: dict[str, Slo] = {}
    for event, key, handle, jct_s in said:
        if event == "received" and key not in present:
            call = LocalCall(str(key), 0.0, 10)
            calls.received(key, call, handle)
            present[key], expected[key] = (call, handle), early.get(handle or "")
        elif event == "refine" and handle is not None:
            slo, known = Slo(jct_s=float(jct_s)), [key for key, (_, own) in present.items() if own == handle]
            assert calls.refine([EngineAnnotations(slo=slo, handle=handle)]) == bool(known)
            expected |= dict.fromkeys(known, slo)
            if not known or handle in early:
                early[handle] = slo
        elif event in {"ended", "retain"}:
            gone = [key] if event == "ended" else [other for other in present if other != key]
            if event == "ended":
                calls.ended(key)
            else:
                calls.retain({key})
            for one in gone:
                if one in present:
                    _, own = present.pop(one)
                    if own is not None and own not in {other for _, other in present.values()}:
                        early.pop(own, None)
        check(calls)
        assert {key: call.slo for key, (call, _) in present.items()} == {key: expected[key] for key in present}


def test_attainment_counts_the_objectives_at_the_end() -> None:
    attainment, calls, call = Attainment(), RefinableCalls(), local_call("a")
    attainment.received("a", call)
    calls.received("a", call, "h")
    attainment.produced("a", 1, 2.0)
    calls.refine([EngineAnnotations(slo=Slo(ttft_s=3.0, tpot_s=0.5), handle="h")])
    attainment.produced("a", 1, 2.6)
    assert attainment.share is None
    attainment.ended("a", 2.6)
    assert attainment.share == 0.0, "the first token came in time, the second did not"
