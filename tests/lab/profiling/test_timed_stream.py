"""Timed tokens from scripted streams: who counts them, when they came, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from plait.backends.http.connection import Response
from plait.lab.profiling.timed_stream import TimedStream, inter_token_s, read_stream

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
DONE = b"data: [DONE]\n\n"


class Connection:
    """Where a finished response would have come from."""

    def resume(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)


class Pieces(Response, kw_only=True):
    """A response whose body arrives in pieces, one a read: those that are `left`."""

    left: Iterator[bytes]

    async def read_chunk(self) -> bytes:
        return next(self.left, b"")


def event(**body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def text(**more: Any) -> bytes:
    return event(choices=[{"index": 0, "text": "a"}], **more)


def ticking() -> Callable[[], float]:
    """A clock that says 1, 2, 3, ... s."""
    ticks = count(1)
    return lambda: float(next(ticks))


async def read(*pieces: bytes) -> TimedStream:
    return await read_stream(Pieces(Connection(), left=iter(pieces)), 0.5, ticking())


async def test_each_piece_is_a_token_unless_something_says_otherwise() -> None:
    stream = await read(text(system_fingerprint="f"), text(), text(), text(), event(choices=[], usage=USAGE), DONE)
    assert stream.arrivals == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
    assert stream.ttft_s == 0.5
    assert (stream.prompt_tokens, stream.cached_tokens, stream.fingerprint) == (9, 8, "f")


async def test_pieces_share_the_tokens_that_the_usage_counts() -> None:
    stream = await read(text(), text(), event(choices=[], usage=USAGE))
    assert stream.arrivals == [(1.0, 2), (2.0, 4)]


async def test_a_running_usage_counts_better() -> None:
    counted = [text(usage={"prompt_tokens": 9, "completion_tokens": tokens}) for tokens in (1, 3, 3, 4)]
    stream = await read(*counted, event(choices=[], usage=USAGE))
    assert stream.arrivals == [(1.0, 1), (2.0, 3), (4.0, 4)]


async def test_events_may_be_cut_anywhere_and_end_with_crlf() -> None:
    whole = (text() + b": a comment\n\n" + text() + event(choices=[], usage=USAGE) + DONE).replace(b"\n", b"\r\n")
    stream = await read(whole[:20], whole[20:])
    assert [tokens for _, tokens in stream.arrivals] == [2, 4]


async def test_an_engine_that_does_not_report_cached_tokens() -> None:
    stream = await read(text(), event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1}))
    assert stream.cached_tokens is None


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([text(), DONE], "no usage"),
        ([event(choices=[], usage=USAGE), DONE], "no tokens"),
        ([event(error={"message": "out of memory"})], "out of memory"),
        ([b"data: {\n\n"], "does not have OpenAI's form"),
    ],
)
async def test_what_is_no_stream_is_refused(pieces: list[bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await read(*pieces)


def stream(*arrivals: tuple[float, int]) -> TimedStream:
    return TimedStream(0.0, list(arrivals))


def test_the_gap_counts_only_while_all_decode() -> None:
    early = stream(*((0.1 * n, n) for n in range(1, 31)), (9.0, 31))
    late = stream(*((2.0 + 0.2 * n, n) for n in range(1, 6)))
    assert inter_token_s([late]) == pytest.approx(0.2)
    assert inter_token_s([early, early]) == pytest.approx(0.1), "not the 6 s before the last token"
    assert inter_token_s([early, late, late]) == pytest.approx(0.1), "early has more tokens from 2.2 s to 3.0 s"


def test_a_stall_and_the_burst_behind_it_do_not_move_the_gap() -> None:
    for stalled in (range(1, 6), range(10, 16), range(26, 31)):
        arrivals = [(0.1 * (stalled[-1] if n in stalled else n), n) for n in range(1, 31)]
        assert inter_token_s([stream(*arrivals)]) == pytest.approx(0.1, rel=0.02)


def test_streams_that_hardly_overlap_tell_nothing() -> None:
    first = stream(*((0.1 * n, n) for n in range(1, 11)))
    assert inter_token_s([first, stream(*((2 + 0.1 * n, n) for n in range(1, 11)))]) is None
    assert inter_token_s([first, stream(*((0.7 + 0.1 * n, n) for n in range(1, 11)))]) is None


def test_tokens_that_come_at_once_tell_nothing() -> None:
    """As a stream that was buffered on its way, or a reader that had no time: a gap of zero is no speed."""
    assert inter_token_s([stream(*((1.0, n) for n in range(1, 31)))]) is None
