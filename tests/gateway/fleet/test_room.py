"""When an engine is sent one more call: while a slot is free and what it was sent is done soon.

A pass takes 10 ms and 1 ms for each new token.
"""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.fleet.room import has_room, room_s
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.prefill_queue import Prefill
from tests.gateway.fleet.lettered_prompts import COSTS, new_router

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
        engine.send(one, now_s)


def new_engine(*sent: Prefill, slots: int = 0, slowness: float = 1.0) -> EngineView:
    """All were sent at 0."""
    engine = new_router("a").engines["a"].view
    engine.slots, engine.slowness = slots, slowness
    send(engine, *sent)
    return engine


def room(engine: EngineView, now_s: float, ahead_s: float = AHEAD_S) -> tuple[bool, float]:
    """Whether there is room, and when there will be."""
    found = has_room(engine, ahead_s, now_s), room_s(engine, ahead_s, now_s)
    engine.queue.check()
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
    engine.send(waiting[0], 0.1)
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


def test_a_long_prompt_alone_leaves_no_room_until_little_of_it_is_left() -> None:
    engine = new_engine(prefill(1490))  # 1.5 s
    assert room(engine, 0.0) == (False, 0.5)
    assert room(engine, 0.25) == (False, 0.5)
    assert room(engine, 0.51)[0]
    assert room(engine, 0.0, 1.6) == (True, 0.0)


def test_no_more_is_expected_of_a_prompt_than_its_most_progress() -> None:
    engine = new_engine(prefill(490), prefill(1490))  # 1.99 s in one pass, of which 0.475 s pass by themselves
    assert room(engine, 0.0) == (False, inf)
    for ahead_s in (1.0, 1.5):
        assert room(engine, 60.0, ahead_s) == (False, inf), "only a first byte shows that the first prompt is done"
    assert room(engine, 0.0, 1.6) == (False, 0.39)


def test_a_first_byte_makes_room() -> None:
    first = prefill(1490)
    engine = new_engine(first, prefill(790))
    assert room(engine, 0.2) == (False, 1.3)
    engine.compute(first, 0.3)
    assert room(engine, 0.3)[0]


def test_a_slow_engine_is_sent_less_ahead() -> None:
    assert has_room(new_engine(prefill(790)), AHEAD_S, 0.0)
    assert not has_room(new_engine(prefill(790), slowness=2.0), AHEAD_S, 0.0)
    assert not has_room(new_engine(prefill(1490)), AHEAD_S, 0.0)
    assert has_room(new_engine(prefill(1490), slowness=0.5), AHEAD_S, 0.0)


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_a_slow_engine_has_room_when_it_was_said_to_have(slowness: float) -> None:
    engine = new_engine(prefill(3990), slowness=slowness)
    when_s = room_s(engine, AHEAD_S, 0.0)
    assert not has_room(engine, AHEAD_S, when_s - 0.01)
    assert has_room(engine, AHEAD_S, when_s + 0.01)


def test_a_prompt_whose_end_nothing_shows_makes_room_when_it_ends_as_predicted() -> None:
    engine = new_engine(prefill(490, is_streamed=False), prefill(990, is_streamed=False))
    assert room(engine, 0.0) == (False, 0.5), "0.49 s have to pass, and 0.475 s may before its end"
    assert room(engine, 0.0, 1.2) == (False, 0.29)
    assert room(engine, 0.5, 0.5) == (False, 1.001), "the first one decodes now"
    assert room(engine, 1.5, 0.5) == (True, 1.5), "both have ended"


def test_with_an_infinite_backlog_no_call_waits() -> None:
    engine = new_engine(*(prefill(5_000) for _ in range(9)))
    assert room(engine, 1.0, inf) == (True, 1.0)
    engine.slots = 9
    assert has_room(engine, inf, 1.0)


def test_with_hardly_a_backlog_a_call_is_sent_when_there_is_nothing_else() -> None:
    streamed = prefill(64)
    engine = new_engine(streamed)
    assert room(engine, 0.0, 0.001) == (False, inf)
    engine.compute(streamed, 0.1)
    assert room(engine, 0.1, 0.001) == (True, 0.1)
    send(engine, prefill(990, is_streamed=False), now_s=0.5)
    assert room(engine, 0.5, 0.001) == (False, 1.5)
    assert room(engine, 1.5, 0.001) == (True, 1.5)


PREFILLS = st.builds(lambda tokens, is_streamed: (tokens, is_streamed), st.integers(1, 3_000), st.booleans())


@given(
    sent=st.lists(PREFILLS, max_size=6),
    held=st.lists(st.integers(1, 3_000), max_size=2),
    asked_s=st.sampled_from((0.0, 0.3, 1.7)),
    ahead_s=st.sampled_from((0.001, 0.5, 1.0, 4.0)),
)
def test_as_time_passes_there_is_no_room_before_it_was_said(
    sent: list[tuple[int, bool]], held: list[int], asked_s: float, ahead_s: float
) -> None:
    """And then there is, where nothing ends without an event; where something does, that is the time to look again."""
    engine = new_engine(*(prefill(tokens, is_streamed=is_streamed) for tokens, is_streamed in sent))
    for tokens in held:
        hold(engine, tokens)
    had_room = has_room(engine, ahead_s, asked_s)
    when_s = room_s(engine, ahead_s, asked_s)
    assert had_room == (when_s == asked_s)
    for tenth in range(1, 200):
        now_s = asked_s + tenth / 10
        if now_s >= when_s:
            break
        assert not has_room(engine, ahead_s, now_s)
    if when_s < inf and all(is_streamed for _, is_streamed in sent):
        assert has_room(engine, ahead_s, when_s + 1e-6)
