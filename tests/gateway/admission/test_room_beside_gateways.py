"""When an engine is sent one more call that other gateways have calls on: each gateway may fill its share."""

from __future__ import annotations

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.prefill_queue import Prefill
from tests.gateway.admission.test_room import AHEAD_S, has_room, new_engine, prefill, room, room_s, send


def other_sent(engine: EngineView, *prefills: Prefill) -> None:
    """Another gateway has sent these, at 0."""
    for one in prefills:
        one.is_own = False
        engine.begin_reported(0.0, one, 0.0)
    engine.gateways = 2


def test_an_engine_that_others_fill_has_room_for_a_gateways_share() -> None:
    engine = new_engine()
    other_sent(engine, prefill(4_990))  # 5 s
    assert room(engine, 0.0) == (True, 0.0), "it has sent nothing"
    send(engine, prefill(190))
    assert room(engine, 0.0) == (True, 0.0)
    send(engine, prefill(400))
    assert room(engine, 0.0)[0] is False, "half a second is its share"
    when_s = room_s(engine, AHEAD_S, 0.0)
    assert not has_room(engine, AHEAD_S, when_s - 0.01)
    assert has_room(engine, AHEAD_S, when_s + 0.01), "it counts with its part of what is left"


def test_while_others_have_little_there_a_gateway_sends_as_much_as_alone() -> None:
    engine = new_engine(prefill(790))
    other_sent(engine, prefill(90))
    assert room(engine, 0.0) == (True, 0.0)
    send(engine, prefill(200))
    assert room(engine, 0.0)[0] is False


def test_the_prompts_of_the_gateways_add_up_to_their_bound_each() -> None:
    """Each sees its own and the other's; none is sent more while both have their share."""
    ours, theirs = new_engine(prefill(590)), new_engine(prefill(590))
    for engine in (ours, theirs):
        other_sent(engine, prefill(590))
        assert not has_room(engine, AHEAD_S, 0.0)


def test_the_slots_of_others_are_taken_but_a_gateways_share_is_not() -> None:
    engine = new_engine(slots=4)
    other_sent(engine, *(prefill(1) for _ in range(4)))
    assert has_room(engine, AHEAD_S, 0.0)
    send(engine, prefill(1), prefill(1))
    assert not has_room(engine, AHEAD_S, 0.0)
