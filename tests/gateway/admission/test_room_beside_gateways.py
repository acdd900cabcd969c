"""When an engine is sent one more call that other gateways have calls on: each gateway may fill its share."""

from __future__ import annotations

from math import inf

from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.prefill_queue import Prefill
from tests.gateway.admission.test_room import (
    AHEAD_S,
    has,
    has_room,
    new_engine,
    prefill,
    room,
    room_of,
    send,
)


def other_sent(engine: EngineView, *prefills: Prefill) -> None:
    """Another gateway has sent these, at 0."""
    for one in prefills:
        one.is_own = False
        engine.begin_reported(0.0, one, 0.0)
    engine.gateways = 2


def test_a_tenant_alone_is_sent_as_much_by_each_gateway() -> None:
    engine, computed = new_engine(), prefill(1)
    other_sent(engine, computed, prefill(4_990))  # 5 s
    assert room(engine, 0.0) == (True, 0.0)
    send(engine, prefill(900))
    assert room(engine, 0.0) == (True, 0.0), "less than a second is its own"
    send(engine, prefill(190))
    assert room(engine, 0.0) == (False, inf)
    engine.compute(computed, 0.1)
    assert has_room(engine, AHEAD_S, 0.1), "it counts with its part of what is left"


def test_of_several_tenants_each_gateway_sends_its_share() -> None:
    shared, engine = room_of("ab"), new_engine()
    other_sent(engine, prefill(4_990))
    assert has(shared, engine, "ab") == [True, True], "it has sent nothing"
    send(engine, prefill(90))
    assert has(shared, engine, "ab") == [True, True]
    send(engine, prefill(60))
    assert has(shared, engine, "ab") == [False, False], "an eighth of a second is its share"


def test_with_little_of_others_there_it_sends_as_much_as_alone() -> None:
    shared, engine = room_of("ab"), new_engine(prefill(190))
    other_sent(engine, prefill(40))
    assert has(shared, engine, "a") == [True]
    send(engine, prefill(20))
    assert has(shared, engine, "a") == [False]


def test_the_slots_of_others_are_taken_but_a_gateways_share_is_not() -> None:
    engine = new_engine(slots=4)
    other_sent(engine, *(prefill(1) for _ in range(4)))
    assert has_room(engine, AHEAD_S, 0.0)
    send(engine, prefill(1), prefill(1))
    assert not has_room(engine, AHEAD_S, 0.0)
