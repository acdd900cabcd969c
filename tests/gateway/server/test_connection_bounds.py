"""How many connections there may be, with literal limits of the system's."""

from __future__ import annotations

import asyncio
import resource
from math import inf
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from plait.backends.errors import TooManyConnectionsError
from plait.gateway.server.request_bounds import (
    LAST_DESCRIPTORS,
    LEAST_IDLE_S,
    LINE_INTERVAL_S,
    OTHER_DESCRIPTORS,
    SPARE_CONNECTIONS,
    STRANGERS_PART,
    ConnectionBounds,
    bounds_by_descriptors,
)


class System:
    """The system's limits of the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.limits = soft, hard
        monkeypatch.setattr(resource, "getrlimit", lambda _: self.limits)
        monkeypatch.setattr(resource, "setrlimit", self._set)

    def _set(self, _: int, limits: tuple[int, int]) -> None:
        assert limits[1] == self.limits[1]
        self.limits = limits


def refused(bounds: ConnectionBounds, connections: int = 1, descriptor: int = 20, now_s: float = 0.0) -> bool:
    try:
        bounds.check(connections, descriptor, now_s)
    except TooManyConnectionsError as error:
        return (error.status, error.code, error.retry_after_s) == (503, "too_many_connections", 1.0)
    return False


@pytest.mark.parametrize("hard", [1_048_576, resource.RLIM_INFINITY])
def test_the_soft_limit_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    system = System(monkeypatch, 1_024, hard)
    with capture_logs() as logs:
        bounds = bounds_by_descriptors(10_000)
    assert (system.limits, logs) == ((20_000 + OTHER_DESCRIPTORS, hard), [])
    assert not refused(bounds, 10_000, 10_100)
    assert refused(bounds, 10_001)


def test_a_limit_that_is_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    bounds = bounds_by_descriptors(10_000)
    assert system.limits == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert not refused(bounds, 10_000, 10**6)


def test_nearly_enough_descriptors_need_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    System(monkeypatch, 64, 20_000)
    with capture_logs() as logs:
        bounds = bounds_by_descriptors(10_000)
    assert (logs, refused(bounds, 9_900), refused(bounds, 9_901)) == ([], False, True)


@pytest.mark.parametrize(("hard", "allowed"), [(64, 8), (1_024, 412), (18_000, 8_900)])
def test_too_few_descriptors_are_said_and_clients_leave_some(
    monkeypatch: pytest.MonkeyPatch, hard: int, allowed: int
) -> None:
    system = System(monkeypatch, 64, hard)
    with capture_logs() as logs:
        bounds = bounds_by_descriptors(10_000)
    assert system.limits == (hard, hard)
    (line,) = logs
    assert (line["log_level"], line["descriptors"], line["connections"]) == ("warning", hard, allowed)
    assert line["needed"] == 20_000 + OTHER_DESCRIPTORS
    assert "ulimit -n" in line["event"]
    assert not refused(bounds, allowed)
    assert refused(bounds, allowed + 1)


def test_the_last_descriptors_are_for_no_client() -> None:
    bounds = ConnectionBounds(10, 100)
    assert not refused(bounds, descriptor=100 - LAST_DESCRIPTORS - 1)
    assert refused(bounds, descriptor=100 - LAST_DESCRIPTORS)
    assert not refused(ConnectionBounds(10, inf), descriptor=10**9)


class FakeIdle:
    def __init__(self, unsent: int = 0) -> None:
        self.transport: Any = Mock(asyncio.Transport)
        self.transport.get_write_buffer_size.return_value = unsent

    @property
    def is_closed(self) -> bool:
        return bool(self.transport.abort.called)


def test_the_longest_idle_one_is_closed_for_a_new_one() -> None:
    bounds = ConnectionBounds(10)
    unread, first, second = all_idle = FakeIdle(unsent=1), FakeIdle(), FakeIdle()
    bounds.idle |= dict.fromkeys(all_idle, 5.0)
    assert not refused(bounds, 10)
    assert refused(bounds, 11, now_s=5.0 + LEAST_IDLE_S / 2), "a request may be on its way"
    now_s = 5.0 + LEAST_IDLE_S
    assert not refused(bounds, 11, now_s=now_s)
    assert (first.is_closed, second.is_closed) == (True, False)
    assert not refused(bounds, 11, now_s=now_s)
    assert refused(bounds, 11, now_s=now_s), "the only one left has not sent all of its answer"
    assert second.is_closed
    assert not unread.is_closed


def test_the_oldest_stranger_is_closed_before_an_idle_one() -> None:
    bounds = ConnectionBounds(8)
    unread, first, second, known = FakeIdle(unsent=1), FakeIdle(), FakeIdle(), FakeIdle()
    bounds.idle |= {known: 0.0, second: 5.0}
    bounds.strangers |= {unread: 4.0, first: 5.0}
    now_s = 5.0 + LEAST_IDLE_S
    assert not refused(bounds, 9, now_s=now_s)
    assert (unread.is_closed, first.is_closed, known.is_closed) == (False, True, False), "the other is being answered"
    bounds.strangers[second] = 5.0
    assert not refused(bounds, 9, now_s=now_s)
    assert (second.is_closed, list(bounds.idle)) == (True, [known])
    assert not refused(bounds, 9, now_s=now_s)
    assert (unread.is_closed, known.is_closed) == (True, False), "if all are"
    assert not refused(bounds, 9, now_s=now_s)
    assert (known.is_closed, bounds.strangers) == (True, {})
    assert refused(bounds, 9, now_s=now_s)


def test_strangers_within_their_part_have_a_moment_for_their_request() -> None:
    bounds, now_s = ConnectionBounds(2 * STRANGERS_PART), 5.0 + LEAST_IDLE_S / 2
    first, second, third = new = [FakeIdle() for _ in range(3)]
    bounds.strangers |= dict.fromkeys(new[:2], 5.0)
    assert refused(bounds, bounds.max_connections + 1, now_s=now_s)
    bounds.strangers[third] = now_s
    assert not refused(bounds, bounds.max_connections + 1, now_s=now_s)
    assert (first.is_closed, second.is_closed, third.is_closed) == (True, False, False)
    assert refused(bounds, bounds.max_connections + 1, now_s=now_s)


def test_a_stranger_is_closed_if_few_descriptors_are_left() -> None:
    bounds, stranger = ConnectionBounds(10, 100), FakeIdle()
    bounds.strangers[stranger] = -LEAST_IDLE_S
    assert refused(bounds, descriptor=100 - LAST_DESCRIPTORS)
    assert stranger.is_closed


def test_who_comes_far_above_the_limit_has_nobody_closed() -> None:
    bounds, idle = ConnectionBounds(10), FakeIdle()
    bounds.idle[idle] = -LEAST_IDLE_S
    assert refused(bounds, 11 + SPARE_CONNECTIONS)
    assert not idle.is_closed


def test_without_descriptors_a_new_one_is_refused_and_an_idle_one_closed_for_the_next() -> None:
    bounds, idle = ConnectionBounds(10, 100), FakeIdle()
    bounds.idle[idle] = -LEAST_IDLE_S
    assert refused(bounds, descriptor=100 - LAST_DESCRIPTORS)
    assert idle.is_closed


def test_who_comes_far_above_the_limit_is_not_told() -> None:
    bounds = ConnectionBounds(10)
    assert not bounds.is_far_above(10 + SPARE_CONNECTIONS)
    assert bounds.is_far_above(11 + SPARE_CONNECTIONS)
    assert not ConnectionBounds(10, 256).is_far_above(26), "few descriptors, few that are told"
    assert ConnectionBounds(10, 256).is_far_above(27)


def test_refused_connections_have_a_line_a_minute() -> None:
    bounds = ConnectionBounds(1, 100)
    with capture_logs() as logs:
        refused(bounds, 1, now_s=0.0)
        for now_s in (5.0, 6.0, 7.0, 5.0 + LINE_INTERVAL_S - 0.1):
            refused(bounds, 2, now_s=now_s)
        refused(bounds, 1, descriptor=99, now_s=5.0 + LINE_INTERVAL_S)
    assert [(line["log_level"], line["too_few"], line["refused"]) for line in logs] == [
        ("warning", "max_connections", 1),
        ("warning", "file descriptors", 4),
    ]
