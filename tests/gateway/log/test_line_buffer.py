from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.log.events import FULL, LineBuffer

INFO, WARNING = False, True


def filled(lines: Iterable[tuple[bool, bytes]], max_lines: int = 4, max_bytes: int = 1000) -> LineBuffer:
    buffer = LineBuffer(max_lines, max_bytes)
    for urgent, line in lines:
        buffer.put(line, urgent=urgent)
    return buffer


def taken(buffer: LineBuffer, most_bytes: int = 10**6) -> list[bytes]:
    return [line for _, _, line in buffer.take(most_bytes)]


def test_lines_come_in_their_order_whatever_their_urgency() -> None:
    buffer = filled([(INFO, b"a"), (WARNING, b"b"), (INFO, b"c"), (WARNING, b"d")])
    assert taken(buffer) == [b"a", b"b", b"c", b"d"]
    assert (len(buffer), buffer.take(1), buffer.dropped) == (0, [], {})


def test_a_new_line_that_finds_no_room_is_dropped_and_counted() -> None:
    buffer = filled((INFO, b"%d" % number) for number in range(6))
    assert buffer.dropped == {(INFO, FULL): 2}
    assert taken(buffer) == [b"0", b"1", b"2", b"3"]


def test_the_newest_infos_make_way_for_a_warning() -> None:
    buffer = filled([(INFO, b"0"), (INFO, b"1"), (WARNING, b"w"), (INFO, b"2"), (WARNING, b"x"), (WARNING, b"y")])
    assert buffer.dropped == {(INFO, FULL): 2}
    assert taken(buffer) == [b"0", b"w", b"x", b"y"]


def test_among_warnings_alone_the_new_one_is_dropped() -> None:
    buffer = filled((WARNING, b"%d" % number) for number in range(5))
    assert buffer.dropped == {(WARNING, FULL): 1}


@pytest.mark.parametrize("urgent", [INFO, WARNING])
def test_the_bytes_are_bounded_too(urgent: bool) -> None:
    buffer = filled([(urgent, b"x" * 400), (urgent, b"x" * 600), (urgent, b"x")], max_lines=100)
    assert buffer.dropped == {(urgent, FULL): 1}
    taken(buffer, 400)
    buffer.put(b"x" * 400, urgent=urgent)
    assert [len(line) for line in taken(buffer)] == [600, 400]


def test_several_infos_make_way_for_a_long_warning() -> None:
    buffer = filled([(INFO, b"x" * 300), (INFO, b"y" * 300), (INFO, b"z" * 300), (WARNING, b"w" * 500)])
    assert [line[:1] for line in taken(buffer)] == [b"x", b"w"]
    assert buffer.dropped == {(INFO, FULL): 2}


def test_a_line_longer_than_the_buffer_is_dropped() -> None:
    buffer = filled([(WARNING, b"x" * 1001)])
    assert (len(buffer), buffer.dropped) == (0, {(WARNING, FULL): 1})


def test_as_many_lines_are_taken_as_fit_but_at_least_one() -> None:
    buffer = filled([(INFO, b"x" * 10), (INFO, b"y" * 10), (INFO, b"z" * 10)])
    assert [len(taken(buffer, most_bytes)) for most_bytes in (20, 5)] == [2, 1]


@given(
    st.lists(st.tuples(st.sampled_from(["put", "take"]), st.booleans(), st.integers(1, 12)), max_size=60),
    st.integers(1, 6),
    st.integers(1, 30),
)
def test_every_line_is_taken_in_order_or_counted(
    events: list[tuple[str, bool, int]], max_lines: int, max_bytes: int
) -> None:
    buffer, out, put = LineBuffer(max_lines, max_bytes), list[tuple[int, bool, bytes]](), {INFO: 0, WARNING: 0}
    for kind, urgent, size in events:
        if kind == "take":
            out += buffer.take(size)
            continue
        lost_before = buffer.dropped[WARNING, FULL]
        put[urgent] += 1
        buffer.put(b"x" * size, urgent=urgent)
        held = [*buffer._common, *buffer._urgent]
        assert len(buffer) == len(held) <= max_lines
        assert sum(len(line) for _, _, line in held) == buffer._size_bytes <= max_bytes
        if buffer.dropped[WARNING, FULL] > lost_before:
            assert not buffer._common, "infos go first"
    out += buffer.take(10**6)
    assert [number for number, _, _ in out] == sorted(number for number, _, _ in out)
    for urgent in (INFO, WARNING):
        assert sum(line[1] == urgent for line in out) + buffer.dropped[urgent, FULL] == put[urgent]
    assert len(buffer) == buffer._size_bytes == 0
