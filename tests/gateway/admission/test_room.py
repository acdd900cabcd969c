"""When an engine is sent one more call: while a slot is free and what it was sent is done soon.

A pass takes 10 ms and 1 ms for each new token.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.admission.room import SHARED_AHEAD_S, Room
from plait.policy.admission.fair_shares import FairShares
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.prefill_queue import Prefill
from tests.gateway.fleet.lettered_prompts import COSTS, new_router
from tests.invariants import check

AHEAD_S = 1.0


def prefill(tokens: int, *, is_streamed: bool = True) -> Prefill:
    return Prefill(tokens, COSTS.prefill_time_s(tokens), 0.0, 0.0, is_streamed)


def hold(engine: EngineView, tokens: int = 500) -> Prefill:
    """A call waits in the gateway."""
    waiting = prefill(tokens)
    engine.begin(0.0, waiting)
    return waiting


def send(engine: EngineView, *prefills: Prefill, now_s: float = 0.0) -> None:
    for one in prefills:
        engine.begin(0.0, one)
        engine.send(0.0, one, now_s)


def new_engine(*sent: Prefill, slots: int = 0, slowness: float = 1.0) -> EngineView:
    """All were sent at 0."""
    engine = new_router("a").engines["a"].view
    engine.slots, engine.slowness = slots, slowness
    send(engine, *sent)
    return engine


def has_room(engine: EngineView, ahead_s: float, now_s: float) -> bool:
    return Room(ahead_s, FairShares()).waits_for(engine, "t", now_s) is None


def room_s(engine: EngineView, ahead_s: float, now_s: float) -> float:
    return Room(ahead_s, FairShares()).due_s(engine, "t", now_s)


def room(engine: EngineView, now_s: float, ahead_s: float = AHEAD_S) -> tuple[bool, float]:
    """Whether there is room, and when there will be."""
    found = has_room(engine, ahead_s, now_s), room_s(engine, ahead_s, now_s)
    check(engine.queue)
    return found[0], round(found[1], 6)


# Slots.


def test_an_engine_is_sent_no_more_calls_than_it_runs() -> None:
    engine = new_engine(prefill(64), prefill(64), slots=2)
    assert room(engine, 0.0) == (False, inf)
    engine.compute(next(iter(engine.queue._sent)), 0.1)
    assert room(engine, 0.1) == (False, inf), "a call that decodes has its slot"
    assert room(engine, 9.0, 60.0) == (False, inf)


def test_a_call_that_has_ended_gives_its_slot_back() -> None:
    one = prefill(64)
    engine = new_engine(one, slots=1)
    engine.end(0.0, one, 0.5)
    assert room(engine, 0.5) == (True, 0.5)


def test_calls_that_wait_in_the_gateway_have_no_slot() -> None:
    engine = new_engine(prefill(64), slots=2)
    waiting = [hold(engine) for _ in range(3)]
    assert room(engine, 0.0)[0]
    engine.send(0.0, waiting[0], 0.1)
    assert room(engine, 0.1) == (False, inf)


def test_slots_that_are_not_known_are_no_limit() -> None:
    assert room(new_engine(*(prefill(1) for _ in range(300))), 0.0)[0]


# What is sent ahead.


@pytest.mark.parametrize("ahead_s", [AHEAD_S, inf])
def test_an_engine_with_nothing_to_compute_is_sent_a_call_whatever_waits_for_it(ahead_s: float) -> None:
    engine = new_engine()
    assert room(engine, 3.0, ahead_s) == (True, 3.0)
    hold(engine, 50_000)
    assert room(engine, 3.0, ahead_s) == (True, 3.0)


def test_what_waits_behind_the_prompt_that_is_computed_leaves_no_room() -> None:
    engine = new_engine(prefill(5_000))
    assert room(engine, 0.0) == (True, 0.0), "that one comes before all others, whatever is sent"
    send(engine, prefill(980))
    assert room(engine, 0.0) == (True, 0.0)
    send(engine, prefill(20))
    assert room(engine, 0.0) == (False, inf)
    assert room(engine, 9.0) == (False, inf), "as time passes it does not get less"
    assert room(engine, 0.0, 1.6) == (True, 0.0)


def test_a_first_byte_makes_room() -> None:
    first = prefill(1490)
    engine = new_engine(first, prefill(790), prefill(290))
    assert room(engine, 0.2) == (False, inf)
    engine.compute(first, 0.3)
    assert room(engine, 0.3)[0]


def test_a_slow_engine_is_sent_less_ahead() -> None:
    first = prefill(1490)
    assert has_room(new_engine(first, prefill(790)), AHEAD_S, 0.0)
    assert not has_room(new_engine(first, prefill(790), slowness=2.0), AHEAD_S, 0.0)
    assert not has_room(new_engine(first, prefill(1490)), AHEAD_S, 0.0)
    assert has_room(new_engine(first, prefill(1490), slowness=0.5), AHEAD_S, 0.0)


def test_a_prompt_whose_end_nothing_shows_makes_room_when_it_ends_as_predicted() -> None:
    engine = new_engine(prefill(490, is_streamed=False), prefill(990, is_streamed=False))
    assert room(engine, 0.0) == (False, 0.5)
    assert room(engine, 0.5) == (True, 0.5), "the first one decodes now"


def test_with_an_infinite_backlog_no_call_waits() -> None:
    engine = new_engine(*(prefill(5_000) for _ in range(9)))
    assert room(engine, 1.0, inf) == (True, 1.0)
    engine.slots = 9
    assert has_room(engine, inf, 1.0)


def test_with_hardly_a_backlog_one_call_is_sent_behind_the_one_that_is_computed() -> None:
    first, second = prefill(64), prefill(64)
    engine = new_engine(first)
    assert room(engine, 0.0, 0.001) == (True, 0.0)
    send(engine, second)
    assert room(engine, 0.0, 0.001) == (False, inf)
    engine.compute(first, 0.1)
    assert room(engine, 0.1, 0.001) == (True, 0.1)


# Several tenants.

SLOTS = 256
"""Four of them are reserved."""


def room_of(
    tenants: str, ahead_s: float = AHEAD_S, *, came_s: float = 0.0, weights: Mapping[str, float] | None = None
) -> Room:
    """The room while these tenants are active."""
    made = Room(ahead_s, FairShares(weights))
    for tenant in tenants:
        made.active.came(tenant, came_s)
    return made


def decode(room: Room, engine: EngineView, calls: Mapping[str, int], now_s: float = 0.0) -> None:
    """Tenants' calls run on the engine. Their prompts are computed."""
    for tenant, number in calls.items():
        for _ in range(number):
            one = prefill(1)
            send(engine, one, now_s=now_s)
            engine.compute(one, now_s)
            room.active.came(tenant, 0.0)
            room.sent[engine.engine_id, tenant] += 1


def has(room: Room, engine: EngineView, tenants: str, now_s: float = 0.0) -> list[bool]:
    """For each of these tenants, whether there is room for a call."""
    return [room.waits_for(engine, tenant, now_s) is None for tenant in tenants]


def test_while_several_tenants_are_active_less_is_sent_ahead() -> None:
    engine = new_engine(prefill(490))  # 0.5 s
    shared = room_of("ab")
    assert has(shared, engine, "abc", 0.0) == [False] * 3
    assert shared.due_s(engine, "a", 0.0) == SHARED_AHEAD_S
    assert has(shared, engine, "abc", 0.26) == [True] * 3
    assert has(room_of("a"), engine, "a") == [True]


def test_a_bound_that_is_shorter_already_stays() -> None:
    engine = new_engine(prefill(140))  # 0.15 s
    assert has(room_of("ab", 0.1), engine, "a") == [False]
    assert room_of("ab", 0.1).due_s(engine, "a", 0.0) == pytest.approx(0.05)


def test_no_more_is_expected_of_a_prompt_than_its_most_progress() -> None:
    shared, engine = (
        room_of("ab"),
        new_engine(prefill(490), prefill(290)),
    )  # 0.475 s of 0.79 pass
    for now_s in (0.0, 60.0):
        assert has(shared, engine, "a", now_s) == [False], "only a first byte shows that the first prompt is done"
        assert shared.due_s(engine, "a", now_s) == inf
    assert shared.due_s(new_engine(prefill(490), prefill(140)), "a", 0.0) == pytest.approx(0.39)


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_a_slow_engine_has_room_when_it_was_said_to_have(slowness: float) -> None:
    shared, engine = room_of("ab"), new_engine(prefill(1990), slowness=slowness)
    when_s = shared.due_s(engine, "a", 0.0)
    assert has(shared, engine, "a", when_s - 0.01) == [False]
    assert has(shared, engine, "a", when_s + 0.01) == [True]


def test_a_tenant_that_has_gone_for_a_minute_does_not_make_the_bound_shorter() -> None:
    shared = room_of("ab")
    shared.active.came("a", 30.0)
    assert has(shared, new_engine(prefill(490)), "a", 0.1) == [False]
    engine = new_engine()
    send(engine, prefill(490), now_s=61.0)
    assert has(shared, engine, "a", 61.0) == [True]


def test_with_an_infinite_backlog_no_call_of_any_tenant_waits() -> None:
    engine = new_engine(prefill(5_000), slots=1)
    assert has(room_of("ab", inf), engine, "ab") == [True, True]


# The pace that was measured.


def test_prompts_that_really_take_long_leave_no_room() -> None:
    shared, engine = room_of("ab"), new_engine(prefill(1), prefill(1))
    engine.first_bytes.came(0.0, 0.1)
    assert has(shared, engine, "ab") == [True, True], "two first bytes take 0.2 s"
    send(engine, prefill(1))
    assert has(shared, engine, "ab") == [False, False], "three take 0.3 s, though 13 ms are predicted"
    assert shared.due_s(engine, "a", 0.0) == inf, "as time passes it is no less"
    assert has(shared, engine, "ab", 50.0) == [False, False]
    engine.compute(next(iter(engine.queue._sent)), 0.1)
    assert has(shared, engine, "ab", 0.1) == [True, True]
    assert shared.due_s(engine, "a", 0.1) == 0.1


def test_a_tenant_alone_waits_for_no_measured_pace() -> None:
    engine = new_engine(*(prefill(1) for _ in range(9)))
    engine.first_bytes.came(0.0, 5.0)
    assert room(engine, 0.0) == (True, 0.0)
    assert has(room_of("a"), engine, "a") == [True]


def test_at_the_measured_pace_there_is_room_when_a_prompt_ends_that_nothing_shows() -> None:
    shared, engine = room_of("ab"), new_engine(prefill(1), prefill(1), prefill(1, is_streamed=False))
    engine.first_bytes.came(0.0, 0.1)
    assert shared.due_s(engine, "a", 0.0) == pytest.approx(0.033), "three times 11 ms"
    assert has(shared, engine, "ab", 0.03) == [False, False]
    assert has(shared, engine, "ab", 0.034) == [True, True]


def test_an_engine_with_nothing_to_compute_has_room_at_any_pace() -> None:
    shared, engine = room_of("ab"), new_engine()
    engine.first_bytes.came(0.0, 5.0)
    assert has(shared, engine, "ab") == [True, True]
    send(engine, prefill(1))
    assert has(shared, engine, "ab") == [False, False]


# As time passes.

PREFILLS = st.builds(lambda tokens, is_streamed: (tokens, is_streamed), st.integers(1, 3_000), st.booleans())


@given(
    sent=st.lists(PREFILLS, max_size=6),
    held=st.lists(st.integers(1, 3_000), max_size=2),
    asked_s=st.sampled_from((0.0, 0.3, 1.7)),
    room=st.builds(room_of, st.sampled_from(("t", "tu")), st.sampled_from((0.001, 0.5, 1.0, 4.0))),
    gap_s=st.sampled_from((0.0, 0.03, 0.1)),
)
def test_as_time_passes_there_is_no_room_before_it_was_said(
    sent: list[tuple[int, bool]], held: list[int], asked_s: float, room: Room, gap_s: float
) -> None:
    """And then there is, where nothing ends without an event; where something does, that is the time to look again."""
    engine = new_engine(*(prefill(tokens, is_streamed=is_streamed) for tokens, is_streamed in sent))
    engine.first_bytes.came(0.0, gap_s)
    for tokens in held:
        hold(engine, tokens)
    when_s = room.due_s(engine, "a", asked_s)
    assert has(room, engine, "t", asked_s) == [when_s == asked_s]
    for tenth in range(1, 200):
        now_s = asked_s + tenth / 10
        if now_s >= when_s:
            break
        assert has(room, engine, "t", now_s) == [False]
    if when_s < inf and all(is_streamed for _, is_streamed in sent):
        assert has(room, engine, "t", when_s + 1e-6) == [True]
