"""Where events end, in bytes that come in pieces."""

import pytest

from plait.gateway.answers.event_bytes import end_of_event


@pytest.mark.parametrize(
    ("arrived", "end"),
    [
        (b"data: a\n\ndata: b\n\ndata: c\n\n", 9),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", 11),
        (b"data: a\n\ndata: b", 9),
        (b"data: a", 7),
        (b"", 0),
    ],
)
def test_the_first_event_that_has_come(arrived: bytes, end: int) -> None:
    assert end_of_event(arrived) == end
