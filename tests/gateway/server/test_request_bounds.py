"""The bounds of a request by themselves, with literal times."""

from __future__ import annotations

import pytest

from plait.backends.errors import CallerError
from plait.gateway.server.request_bounds import (
    DRAIN_S,
    LINE_BYTES,
    MIN_BODY_BYTES_S,
    Part,
    RequestBounds,
    RequestLimits,
)

LIMITS = RequestLimits(max_headers=3, max_header_bytes=100, header_timeout_s=10.0, body_timeout_s=60.0)


def reading(size: int = 50, at_s: float = 5.0) -> RequestBounds:
    """A connection made at 0 s that is in the middle of a head."""
    bounds = RequestBounds(LIMITS, 0.0)
    bounds.parsed(size, at_s, begun=True)
    return bounds


def head(size: int, headers: int = 1) -> tuple[str, bytes, list[tuple[bytes, bytes]]]:
    """Version, target and headers of so many bytes in all, with the `: ` and the end of each header's line."""
    return "1.0", b"/" * (size - headers * (1 + 4)), [(b"a", b"")] * headers


def status(error: CallerError | None) -> int | None:
    return None if error is None else error.status


def test_a_new_connection_has_to_send_something() -> None:
    bounds = RequestBounds(LIMITS, 0.0)
    assert (bounds.deadline_s, bounds.overdue()) == (10.0, None)


def test_a_head_has_its_time_from_its_first_byte() -> None:
    bounds = reading(at_s=9.0)
    bounds.parsed(10, 18.0, begun=True)
    assert (bounds.deadline_s, status(bounds.overdue())) == (19.0, 408)


def test_an_empty_line_begins_a_request_too() -> None:
    bounds = RequestBounds(LIMITS, 0.0)
    bounds.parsed(2, 5.0, begun=False)
    assert (bounds.part, bounds.deadline_s) == (Part.HEAD, 15.0)
    bounds.parsed(2, 9.0, begun=False)
    assert bounds.deadline_s == 15.0
    bounds.parsed(10, 12.0, begun=True)
    assert bounds.deadline_s == 22.0


def test_a_body_earns_time_by_its_bytes() -> None:
    bounds = reading()
    bounds.head(*head(50), 6.0)
    assert bounds.deadline_s == 66.0
    bounds.body_bytes += 2 * MIN_BODY_BYTES_S
    bounds.parsed(2 * MIN_BODY_BYTES_S, 7.0, begun=False)
    assert (bounds.deadline_s, status(bounds.overdue())) == (68.0, 408)
    bounds.part = Part.NOTHING
    bounds.parsed(10, 7.0, begun=False)
    assert repr(bounds) == "RequestBounds(nothing, deadline_s=None)"


def test_the_rest_of_an_answered_body_is_not_read_for_long() -> None:
    bounds = reading()
    bounds.head(*head(50), 6.0)
    bounds.answered(7.0)
    assert bounds.deadline_s == 7.0 + DRAIN_S
    bounds.body_bytes += 20 * MIN_BODY_BYTES_S
    bounds.parsed(20 * MIN_BODY_BYTES_S, 8.0, begun=False)
    assert bounds.deadline_s == 7.0 + DRAIN_S, "not even of one that comes fast"
    bounds.part = Part.NOTHING
    bounds.parsed(50, 9.0, begun=True)
    bounds.head(*head(50), 10.0)
    bounds.body_bytes += MIN_BODY_BYTES_S
    bounds.parsed(MIN_BODY_BYTES_S, 10.0, begun=False)
    assert bounds.deadline_s == 71.0, "the next one has its own time"


def test_a_server_that_does_not_read_blames_nobody() -> None:
    bounds = reading()
    bounds.head(*head(50), 6.0)
    bounds.excuse(500.0)
    assert bounds.deadline_s == 560.0


def test_headers_are_counted() -> None:
    reading().head(*head(100, LIMITS.max_headers), 6.0)
    with pytest.raises(CallerError, match="more than 3 headers") as caught:
        reading().head(*head(100, LIMITS.max_headers + 1), 6.0)
    assert (caught.value.status, caught.value.code) == (431, "too_many_headers")


def test_the_bytes_of_target_and_headers_are_counted() -> None:
    bounds = RequestBounds(LIMITS, 0.0)
    bounds.head(*head(100), 6.0)
    bounds.body_bytes += 400  # in the same piece
    bounds.parsed(500, 6.0, begun=False)
    with pytest.raises(CallerError, match="more than 100 bytes") as caught:
        RequestBounds(LIMITS, 0.0).head(*head(101), 6.0)
    assert caught.value.code == "headers_too_large"


def test_a_header_without_an_end_is_not_gathered() -> None:
    bounds = reading()
    bounds.parsed(50 + LINE_BYTES, 6.0, begun=True)
    with pytest.raises(CallerError):
        bounds.parsed(1, 6.1, begun=True)


def test_a_body_in_single_bytes_is_slow_and_allowed() -> None:
    bounds = reading()
    bounds.head(*head(50), 6.0)
    for _ in range(1_000):
        bounds.body_bytes += 1
        bounds.chunk_ended()
        bounds.parsed(6, 7.0, begun=False)


def test_trailers_without_an_end_are_not_gathered() -> None:
    bounds = reading()
    bounds.head(*head(50), 6.0)
    bounds.parsed(50 + LINE_BYTES, 7.0, begun=False)
    with pytest.raises(CallerError):
        bounds.parsed(1, 7.0, begun=False)


def test_chunk_extensions_are_counted_whatever_the_body() -> None:
    bounds = reading()
    bounds.head(*head(50), 6.0)
    bounds.body_bytes += 1_000
    bounds.chunk_ended()  # its size is 3e8
    bounds.parsed(1_000 + 7, 7.0, begun=False)
    bounds.parsed(50 + LINE_BYTES, 7.0, begun=False)
    with pytest.raises(CallerError, match="chunk extensions"):
        bounds.parsed(1, 7.0, begun=False)


def test_trailers_are_headers() -> None:
    bounds = reading()
    bounds.head(*head(50), 6.0)
    bounds.trailer(b"a", b"b" * 45)
    with pytest.raises(CallerError, match="more than 100 bytes"):
        bounds.trailer(b"", b"")
    bounds = reading()
    bounds.head(*head(50, 2), 6.0)
    bounds.trailer(b"a", b"b")
    with pytest.raises(CallerError, match="more than 3 headers"):
        bounds.trailer(b"a", b"b")


def test_a_request_does_not_pay_for_those_before_it() -> None:
    """Five in one piece of the network, and the sixth in two."""
    bounds = RequestBounds(LIMITS, 0.0)
    for _ in range(5):
        bounds.head(*head(90), 5.0)
        bounds.body_bytes += 200
        bounds.part = Part.NOTHING
    bounds.parsed(5 * (90 + 200) + 50, 5.0, begun=True)
    assert (bounds.part, bounds.deadline_s) == (Part.HEAD, 15.0)
    bounds.head(*head(100), 6.0)
    bounds.parsed(50, 6.0, begun=False)
    with pytest.raises(CallerError):
        bounds.parsed(LINE_BYTES + 1, 6.0, begun=False)


def test_a_request_does_not_pay_for_the_trailers_of_one_before_it() -> None:
    bounds = RequestBounds(LIMITS, 0.0)
    bounds.head(*head(90), 5.0)
    bounds.trailer(b"a", b"b")
    bounds.part = Part.NOTHING
    bounds.parsed(96 + 100 + LINE_BYTES, 5.0, begun=True)
    with pytest.raises(CallerError):
        bounds.parsed(1, 6.0, begun=True)


def test_a_head_in_two_pieces_is_counted() -> None:
    bounds = reading(80)
    with pytest.raises(CallerError, match="more than 100 bytes"):
        bounds.head(*head(120), 6.0)


def test_the_next_request_starts_anew() -> None:
    bounds = reading()
    bounds.head(*head(100, 3), 6.0)
    bounds.part = Part.NOTHING
    bounds.parsed(50, 6.0, begun=False)
    bounds.parsed(50, 9.0, begun=True)
    assert (bounds.part, bounds.deadline_s) == (Part.HEAD, 19.0)
