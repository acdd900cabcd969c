"""Stored responses against an oracle that keeps everything, and their bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import CallerError, NotFoundError
from plait.gateway.guests.responses.stored_responses import StoredResponses
from tests.pieces import at_once

TTL_S = 10.0


def put(
    stored: StoredResponses, name: str, previous: str | None, now_s: float, *, tenant: str = "t", pad: int = 0
) -> None:
    items = json.dumps([{"in": name, "pad": "x" * pad}]).encode()
    answer = json.dumps({"id": name, "output": [{"out": name}]}).encode()
    stored.put(tenant, name, previous=previous, items=items, answer=answer, now_s=now_s)


def held(_size: int) -> None:
    """What is joined counts nowhere here."""


def items(stored: StoredResponses, tenant: str, item_ids: list[str], now_s: float) -> dict[str, Any]:
    return at_once(stored.items(tenant, item_ids, held, now_s))


def names(stored: StoredResponses, name: str, now_s: float, tenant: str = "t") -> list[str]:
    return [item.get("in") or item["out"] for item in at_once(stored.said_before(tenant, name, held, now_s))]


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 3)), max_size=40))
def test_what_was_said_before_is_the_chain(steps: list[tuple[int, float]]) -> None:
    """Each step answers after an earlier response, or after none; a tree of conversations."""
    stored, now_s = StoredResponses(10**6, 1e9), 0.0
    said: dict[str | None, list[str]] = {None: []}
    known: list[str | None] = [None]
    for number, (choice, pause_s) in enumerate(steps):
        now_s += pause_s
        previous, name = known[choice % len(known)], str(number)
        put(stored, name, previous, now_s)
        known.append(name)
        said[name] = [*said[previous], name, name]
        for one in known[1:]:
            assert one is not None
            assert names(stored, one, now_s) == said[one]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 120), st.floats(0, 6)), max_size=40))
def test_the_bytes_are_counted_and_bounded(steps: list[tuple[str, int, float]]) -> None:
    stored, now_s = StoredResponses(300, TTL_S), 0.0
    for name, pad, pause_s in steps:
        now_s += pause_s
        put(stored, name, None, now_s, pad=pad)
        held = 0
        for one in "abcdef":
            try:
                held += stored.get("t", one, now_s).size_bytes
            except NotFoundError:
                continue
        assert held == stored.size_bytes("t") <= 300


def test_the_least_recently_used_go_first_and_unused_ones_by_themselves() -> None:
    stored = StoredResponses(200, TTL_S)
    put(stored, "a", None, 0.0)
    put(stored, "b", None, 1.0)
    stored.get("t", "a", 2.0)
    put(stored, "c", None, 3.0, pad=60)
    assert names(stored, "a", 4.0) == ["a", "a"]
    with pytest.raises(NotFoundError):
        stored.get("t", "b", 4.0)
    with pytest.raises(NotFoundError):
        stored.get("t", "a", 4.1 + TTL_S)
    assert stored.size_bytes("t") == 0


def test_a_gap_in_the_chain_is_the_callers_error() -> None:
    stored = StoredResponses(10_000, TTL_S)
    put(stored, "a", None, 0.0)
    put(stored, "b", "a", 0.0)
    stored.delete("t", "a", 0.0)
    for name, missing in (("b", "'a', which 'b' continues, not found"), ("never", "'never' not found")):
        with pytest.raises(CallerError, match=missing) as caught:
            at_once(stored.said_before("t", name, held, 0.0))
        assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")


def test_tenants_do_not_see_each_other() -> None:
    stored = StoredResponses(10_000, TTL_S)
    put(stored, "a", None, 0.0, tenant="one")
    with pytest.raises(NotFoundError):
        stored.get("two", "a", 0.0)


def test_none_are_stored_without_room() -> None:
    stored = StoredResponses(0, TTL_S)
    put(stored, "a", None, 0.0)
    assert stored.size_bytes("t") == 0


def test_items_are_found_by_their_ids_until_their_response_goes() -> None:
    stored = StoredResponses(10_000, TTL_S)
    outputs: dict[str, list[object]] = {"a": [{"id": "i1", "n": 1}, {"n": 2}, {"id": 3}], "b": [{"id": "i2"}], "c": []}
    for name, output in outputs.items():
        answer = json.dumps({"output": output}).encode()
        stored.put("t", name, previous=None, items=b"[]", answer=answer, now_s=0.0)
    assert items(stored, "t", ["i1"], 1.0) == {"i1": {"id": "i1", "n": 1}}
    assert items(stored, "other", ["i1"], 1.0) == {}
    stored.delete("t", "a", 2.0)
    assert items(stored, "t", ["i1", "i2"], 2.0) == {"i2": {"id": "i2"}}
    assert items(stored, "t", ["i2"], 3.0 + TTL_S) == {}
    for name in ("d", "e"):
        stored.put("t", name, previous=None, items=b"[]", answer=b'{"output": [{"id": "same"}]}', now_s=10.0)
    stored.delete("t", "d", 10.0)
    assert items(stored, "t", ["same"], 10.0) == {"same": {"id": "same"}}
    stored.put("t", "odd", previous=None, items=b"[]", answer=b'{"output": 3}', now_s=20.0)
