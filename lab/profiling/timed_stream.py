"""Reads a completion's stream and notes when each token came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import msgspec

from plait.backends.http.connection import Response

FEWEST_GAPS = 4
"""A slope spans at least this many gaps between tokens. Shorter spans measure the network, not the engine."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _StreamUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[Any] | None = None
    usage: _StreamUsage | None = None
    system_fingerprint: str | None = None
    error: Any = None


@dataclass(slots=True)
class TimedStream:
    """`arrivals` has the time of each piece, and the number of tokens until then.

    `cached_tokens` is None if the engine does not report it.
    """

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    fingerprint: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s


async def read_stream(response: Response, sent_s: float, clock: Callable[[], float]) -> TimedStream:
    """Read a stream of `/v1/completions` to its end. Raises ValueError for an error in it, or for anything else.

    The running usage counts the tokens if the engine sends it (`continuous_usage_stats`). Otherwise the tokens of the
    final usage are divided evenly among the pieces.
    """
    collector, buffer = _Collector(TimedStream(sent_s)), b""
    while piece := await response.read_chunk():
        now_s = clock()
        *events, buffer = (buffer + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in map(_decode, events):
            if event is not None:
                collector.add(event, now_s)
    return collector.whole()


class _Collector:
    """Collects the events of one stream."""

    def __init__(self, stream: TimedStream) -> None:
        self._stream = stream
        self._usage: _StreamUsage | None = None
        self._counted = 0  # tokens so far, by the running usage

    def add(self, event: _Event, now_s: float) -> None:
        self._usage = event.usage or self._usage
        self._stream.fingerprint = event.system_fingerprint or self._stream.fingerprint
        arrivals = self._stream.arrivals
        if not event.choices:
            return
        if event.usage is None:
            arrivals.append((now_s, len(arrivals) + 1))
        elif (tokens := event.usage.completion_tokens or 0) > self._counted:
            self._counted = tokens
            arrivals.append((now_s, tokens))

    def whole(self) -> TimedStream:
        stream, usage = self._stream, self._usage
        if usage is None or not stream.arrivals:
            raise ValueError("its stream has no tokens or no usage")
        if not self._counted:
            pieces, tokens = len(stream.arrivals), usage.completion_tokens or 0
            stream.arrivals = [(at_s, round(count * tokens / pieces)) for at_s, count in stream.arrivals]
        stream.prompt_tokens = usage.prompt_tokens
        stream.cached_tokens = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        return stream


def inter_token_s(streams: Sequence[TimedStream]) -> float | None:
    """The time between tokens while all streams were decoding; None if they overlapped too little or came at once.

    The estimate is the median slope between two arrivals of a stream (Theil and Sen). A process that stalls delivers
    tokens late, then many at once, which moves single arrivals and gaps, but few slopes.
    """
    starts_s = max(stream.arrivals[0][0] for stream in streams)
    ends_s = min(stream.arrivals[-1][0] for stream in streams)
    slopes: list[float] = []
    for stream in streams:
        window = [arrival for arrival in stream.arrivals if starts_s <= arrival[0] <= ends_s]
        if not window or window[-1][1] - window[0][1] < FEWEST_GAPS:
            return None
        slopes += (
            (after_s - before_s) / (after - before)
            for (before_s, before), (after_s, after) in combinations(window, 2)
            if after - before >= FEWEST_GAPS
        )
    return median(slopes) or None  # no time between tokens: they were buffered on their way, and read in one piece


def _decode(event: bytes) -> _Event | None:
    """An event's data; None for a comment or the end. Raises ValueError for an error event or unreadable data."""
    if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
        return None
    try:
        decoded = msgspec.json.decode(event.removeprefix(b"data:"), type=_Event)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"its stream does not have OpenAI's form: {error}") from error
    if decoded.error is not None:
        raise ValueError(f"its stream ended with an error: {decoded.error}")
    return decoded
