"""Slots that are kept from tenants above their share."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.admission.room import RESERVED_S
from tests.gateway.admission.test_room import SLOTS, decode, has, new_engine, room_of


def test_the_last_slots_are_for_tenants_with_less_than_their_share() -> None:
    shared, engine = room_of("ab"), new_engine(slots=SLOTS)
    decode(shared, engine, {"a": SLOTS - 5})
    assert has(shared, engine, "ab") == [True, True], "five slots are free"
    decode(shared, engine, {"a": 1})
    assert has(shared, engine, "ab") == [False, True]
    decode(shared, engine, {"b": 3})
    assert has(shared, engine, "ab") == [False, True]
    assert shared.has_last(engine, None, 0.0)
    decode(shared, engine, {"b": 1})
    assert has(shared, engine, "ab") == [False, False]
    assert not shared.has_last(engine, None, 0.0)
    assert shared.due_s(engine, "a", 0.0) == inf


def test_slots_are_kept_for_the_calls_that_tenants_send_in_a_second() -> None:
    engine, shared = new_engine(slots=SLOTS), room_of("ab")
    for _ in range(20):
        shared.came(engine.engine_id, "b", 0.0)
    decode(shared, engine, {"a": SLOTS - 21, "b": 0})
    assert has(shared, engine, "ab") == [True, True], "21 slots are free"
    decode(shared, engine, {"a": 1})
    assert has(shared, engine, "ab") == [False, True]
    assert shared.due_s(engine, "a", 0.5) == RESERVED_S, "then fewer may be kept"
    decode(shared, engine, {"b": 20})
    assert has(shared, engine, "ab") == [False, False]


def test_no_slots_are_kept_for_a_tenant_that_has_its_share() -> None:
    engine, shared = new_engine(slots=SLOTS), room_of("ab")
    for tenant in "ab":
        for _ in range(100):
            shared.came(engine.engine_id, tenant, 0.0)
    decode(shared, engine, {"a": SLOTS // 2, "b": SLOTS // 2 - 5})
    assert has(shared, engine, "ab") == [False, True], "b has five less than its share"
    decode(shared, engine, {"b": 2})
    assert has(shared, engine, "ab", RESERVED_S) == [False, True]


def test_one_tenant_alone_has_all_slots() -> None:
    alone, engine = room_of("a"), new_engine(slots=SLOTS)
    decode(alone, engine, {"a": SLOTS - 1})
    assert has(alone, engine, "a") == [True]
    decode(alone, engine, {"a": 1})
    assert has(alone, engine, "a") == [False]


def test_a_minute_after_the_others_have_gone_no_slot_is_reserved() -> None:
    shared, engine = room_of("ab"), new_engine(slots=SLOTS)
    decode(shared, engine, {"a": SLOTS - 4})
    shared.active.came("a", 40.0)
    assert has(shared, engine, "a", 60.0) == [False]
    assert has(shared, engine, "a", 60.1) == [True]


def test_the_share_of_the_slots_goes_by_weight() -> None:
    shared, engine = room_of("ab", weights={"a": 3.0}), new_engine(slots=SLOTS)
    decode(shared, engine, {"a": 191, "b": 61})
    assert has(shared, engine, "ab") == [True, True], "192 and 64 are theirs"
    decode(shared, engine, {"a": 1})
    assert has(shared, engine, "ab") == [False, True]


def test_a_call_that_has_left_does_not_count_for_its_tenants_share() -> None:
    shared, engine = room_of("ab"), new_engine(slots=SLOTS)
    decode(shared, engine, {"a": 128, "b": 124})
    assert has(shared, engine, "ab") == [False, True]
    shared.left("a", "a")
    assert has(shared, engine, "ab") == [True, True]
    for tenant, number in (("a", 127), ("b", 124)):
        for _ in range(number):
            shared.left("a", tenant)
    assert not shared.sent


def test_an_engine_with_few_slots_reserves_none() -> None:
    shared, engine = room_of("ab"), new_engine(slots=63)
    decode(shared, engine, {"a": 62})
    assert has(shared, engine, "ab") == [True, True]


@given(
    slots=st.sampled_from((64, 128, 200)),
    free=st.integers(1, 5),
    parts=st.tuples(*[st.integers(0, 9)] * 3),
    weights=st.tuples(*[st.sampled_from((0.25, 1.0, 3.0))] * 3),
)
def test_of_the_tenants_one_always_gets_a_free_slot_and_nobody_with_less_than_its_share_is_refused(
    slots: int, free: int, parts: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    of, total, used = dict(zip("abc", weights, strict=True)), sum(parts) or 1, slots - free
    calls = {tenant: used * part // total for tenant, part in zip("abc", parts, strict=True)}
    calls["a"] += used - sum(calls.values())
    shared, engine = room_of("abc", weights=of), new_engine(slots=slots)
    decode(shared, engine, calls)
    found = dict(zip("abc", has(shared, engine, "abc"), strict=True))
    assert any(found.values())
    for tenant, has_slot in found.items():
        if has_slot:
            continue
        assert free <= slots // 64
        assert calls[tenant] >= slots * of[tenant] / sum(weights)
