"""Events of a gateway's stream, as a command reads them. `test_status.py` has the errors of answers."""

from __future__ import annotations

import threading

import pytest

from plait.gateway.commands.asked_gateway import AskedGateway, _parsed


def test_events_are_read_line_by_line() -> None:
    lines = iter(["event: fleet", 'data: {"at": 1}', "", ": a comment", "event: calls", "data: {}", ""])
    assert list(_parsed(lines)) == [("fleet", {"at": 1}), ("calls", {})]


def test_a_gateway_that_is_not_there_is_tried_again() -> None:
    is_over = threading.Event()
    found = AskedGateway("http://127.0.0.1:9", "key").events(is_over)
    assert next(found) == ("lost", {})
    is_over.set()
    assert list(found) == []


@pytest.mark.parametrize("key", ["sk-admin\n", "schlüssel", "a b"])
def test_a_key_that_no_header_can_carry_is_named_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match=r"PLAIT_ADMIN_KEY = \(hidden\): expected") as caught:
        AskedGateway("http://127.0.0.1:9", key)
    assert key not in str(caught.value)
