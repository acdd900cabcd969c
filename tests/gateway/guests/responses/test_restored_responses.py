"""Stored responses that are restored from a log, in any order, while others are made, used and dropped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import log2

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.errors import NotFoundError, PlaitError
from plait.gateway.guests.responses.stored_responses import StoredResponses, _Kept
from plait.gateway.streams import RESPONSE, Change, StoredStream, StreamKey
from tests.pieces import at_once

OFFSET_S = 1000.0
ITEMS, ANSWER = b"[]", b'{"output": [{"id": "i"}]}'
SIZE = len(ITEMS + ANSWER)


class NotRestoredError(PlaitError):
    pass


class Log:
    """A log whose responses were read and not restored yet. Notes the responses that are dropped."""

    def __init__(self) -> None:
        self.left: dict[str, StoredStream] = {}
        self.dropped: list[str] = []
        self.stored: StoredResponses

    def add(self, name: str, used_s: float, answer: bytes = ANSWER) -> None:
        key = StreamKey(RESPONSE, "t", name)
        kept = msgspec.msgpack.encode(_Kept(None, ITEMS, answer))
        self.left[name] = StoredStream(key, [Change(key, used_s + OFFSET_S, kept)])

    def check(self, *, is_whole: bool = False) -> None:
        if is_whole and self.left:
            raise NotRestoredError("later")

    def make(self, tenant: str, response_id: str) -> None:
        stream = self.left.pop(response_id, None) if tenant == "t" else None
        if stream is not None:
            self.stored.restore(stream, OFFSET_S, 0.0)

    def append(self, changes: Sequence[Change]) -> None:
        self.dropped += [change.stream.name for change in changes if change.data is None]

    async def committed(self, stream: StreamKey) -> bool:
        return stream.tenant == "t"

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unix_s(self, now_s: float) -> float:
        return now_s + OFFSET_S


def opened(max_bytes: int) -> tuple[StoredResponses, Log]:
    log = Log()
    log.stored = StoredResponses(max_bytes, 1e9, log)
    return log.stored, log


STEPS = st.lists(st.tuples(st.sampled_from(["read", "make", "put", "get", "delete"]), st.integers(0, 8)), max_size=80)


@given(STEPS)
def test_the_least_recently_used_go_first_in_whatever_order_they_were_restored(steps: list[tuple[str, int]]) -> None:
    stored, log = opened(100 * SIZE)
    used_s = dict[str, float]()  # the oracle
    for now_s, (what, number) in enumerate(steps, 1):
        name = f"r{number}"
        match what:
            case "read" if name not in used_s:  # another gateway's, last used before what lives here or after it
                used_s[name] = now_s - 1 - 8 * number + 0.5
                log.add(name, used_s[name])
            case "make":
                log.make("t", name)
            case "put":
                stored.put("t", name, previous=None, items=ITEMS, answer=ANSWER, now_s=now_s)
                used_s[name] = now_s
            case "get" if name in used_s:
                assert stored.get("t", name, now_s).answer == ANSWER
                used_s[name] = now_s
            case "delete" if name in used_s:
                stored.delete("t", name, now_s)
                del used_s[name]
            case "get" | "delete" if name not in used_s:
                with pytest.raises(NotFoundError):
                    stored.get("t", name, now_s)
    for name in list(log.left):
        assert stored.has("t", name)
    assert stored.size_bytes("t") == SIZE * len(used_s)
    log.dropped.clear()
    stored.put("t", "all", previous=None, items=b"", answer=bytes(100 * SIZE), now_s=1e6)
    assert log.dropped == sorted(used_s, key=used_s.__getitem__)


@given(st.permutations(range(12)), st.lists(st.integers(0, 40), min_size=12, max_size=12), st.integers(1, 300))
def test_the_newest_that_have_room_are_kept(order: list[int], pads: list[int], max_bytes: int) -> None:
    stored, log = opened(max_bytes)
    for number, pad in enumerate(pads):
        log.add(f"r{number}", float(number), ANSWER + b" " * pad)
    for number in order:
        log.make("t", f"r{number}")
    kept, room = set[int](), max_bytes
    for number in reversed(range(12)):
        room -= SIZE + pads[number]
        if room < 0:
            break
        kept.add(number)
    assert kept <= {number for number in range(12) if stored.has("t", f"r{number}")}
    assert stored.size_bytes("t") <= max_bytes


class CountedTime(float):
    """A time that counts how often times are compared."""

    count = 0

    def __sub__(self, other: float) -> CountedTime:
        return CountedTime(float(self) - other)

    def __lt__(self, other: float) -> bool:
        CountedTime.count += 1
        return float(self) < float(other)

    def __gt__(self, other: float) -> bool:
        CountedTime.count += 1
        return float(self) > float(other)


@pytest.mark.parametrize("step", [1, -1, 7])
def test_to_restore_one_takes_the_logarithm_of_all(step: int) -> None:
    count = 4_001
    stored, _ = opened(count * SIZE)
    CountedTime.count = 0
    for number in range(count):
        key = StreamKey(RESPONSE, "t", str(number))
        used_s = CountedTime(number * step % count + OFFSET_S)
        kept = msgspec.msgpack.encode(_Kept(None, ITEMS, ANSWER))
        stored.restore(StoredStream(key, [Change(key, used_s, kept)]), OFFSET_S, 0.0)
    assert stored.size_bytes("t") == count * SIZE
    assert CountedTime.count <= 2 * count * log2(count)


def test_dropped_ones_leave_nothing_in_the_order() -> None:
    stored, _ = opened(100 * SIZE)
    stored.put("t", "stays", previous=None, items=ITEMS, answer=ANSWER, now_s=0.0)
    for number in range(1_000):
        stored.put("t", "goes", previous=None, items=ITEMS, answer=ANSWER, now_s=1.0 + number)
        stored.delete("t", "goes", 1.0 + number)
    assert len(stored._tenants["t"].by_use) <= 67


def test_an_item_that_is_nowhere_may_be_in_what_is_not_restored() -> None:
    stored, log = opened(100 * SIZE)
    log.add("r", 0.0)
    with pytest.raises(NotRestoredError):
        at_once(stored.items("t", ["i"], int, 1.0))
    log.make("t", "r")
    log.add("other", 0.0)
    assert at_once(stored.items("t", ["i"], int, 1.0)) == {"i": {"id": "i"}}
    log.left.clear()
    assert at_once(stored.items("t", ["never"], int, 1.0)) == {}
