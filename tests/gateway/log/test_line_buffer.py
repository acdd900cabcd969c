from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.log.events import FULL, LineBuffer

INFO, WARNING = False, True


def filled(lines: Iterable[tuple[bool, bytes]], max_lines: int = 8, max_bytes: int = 1000) -> LineBuffer:
    buffer = LineBuffer(max_lines, max_bytes)
    for urgent, line in lines:
        buffer.put(line, urgent=urgent)
    return buffer


def taken(buffer: LineBuffer, most_bytes: int = 10**6) -> list[bytes]:
    return [line for _, line in buffer.take(most_bytes)]


def test_lines_come_in_their_order_whatever_their_urgency() -> None:
    buffer = filled([(INFO, b"a"), (WARNING, b"b"), (INFO, b"c"), (WARNING, b"d")])
    assert taken(buffer) == [b"a", b"b", b"c", b"d"]
    assert (len(buffer), buffer.take(1), buffer.dropped) == (0, [], {})


def test_a_new_line_that_finds_no_room_is_dropped_and_counted() -> None:
    buffer = filled([(INFO, b"%d" % number) for number in range(6)])
    assert buffer.dropped == {(INFO, FULL): 2}
    assert taken(buffer) == [b"0", b"1", b"2", b"3"]


def test_warnings_have_room_behind_a_flood_of_infos() -> None:
    buffer = filled([(INFO, b"0"), (INFO, b"1"), (INFO, b"2"), (WARNING, b"w"), (WARNING, b"x"), (WARNING, b"y")], 4)
    assert buffer.dropped == {(INFO, FULL): 1, (WARNING, FULL): 1}
    assert taken(buffer) == [b"0", b"1", b"w", b"x"]


@pytest.mark.parametrize(("urgent", "max_bytes"), [(INFO, 2000), (WARNING, 1000)])
def test_the_bytes_are_bounded_too(urgent: bool, max_bytes: int) -> None:
    lines = [(urgent, b"x" * 400), (urgent, b"x" * 600), (urgent, b"x")]
    buffer = filled(lines, max_lines=100, max_bytes=max_bytes)
    assert buffer.dropped == {(urgent, FULL): 1}
    taken(buffer, 400)
    buffer.put(b"x" * 400, urgent=urgent)
    assert [len(line) for line in taken(buffer)] == [600, 400]


def test_a_line_longer_than_the_buffer_is_dropped() -> None:
    buffer = filled([(WARNING, b"x" * 1001)])
    assert (len(buffer), buffer.dropped) == (0, {(WARNING, FULL): 1})


def test_as_many_lines_are_taken_as_fit_but_at_least_one() -> None:
    buffer = filled([(WARNING, b"x" * 10), (INFO, b"y" * 10), (INFO, b"z" * 10)])
    assert [len(taken(buffer, most_bytes)) for most_bytes in (20, 5)] == [2, 1]


@given(
    st.lists(st.tuples(st.sampled_from(["put", "take"]), st.booleans(), st.integers(1, 12)), max_size=60),
    st.integers(1, 6),
    st.integers(1, 30),
)
def test_every_line_is_taken_or_counted(events: list[tuple[str, bool, int]], max_lines: int, max_bytes: int) -> None:
    buffer, out, put = LineBuffer(max_lines, max_bytes), list[tuple[bool, bytes]](), {INFO: 0, WARNING: 0}
    for kind, urgent, size in events:
        if kind == "take":
            out += buffer.take(size)
            continue
        put[urgent] += 1
        buffer.put(b"x" * size, urgent=urgent)
        assert len(buffer) <= max_lines
        assert sum(len(line) for _, line in buffer._lines) == buffer._size_bytes <= max_bytes
    out += buffer.take(10**6)
    for urgent in (INFO, WARNING):
        assert sum(line[0] == urgent for line in out) + buffer.dropped[urgent, FULL] == put[urgent]
    assert len(buffer) == buffer._size_bytes == 0
