"""Writes one answer, good or altered, on a connection that may break it off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from e2e.faults.actions import GOOD, Altered, Ending, Raw
from e2e.faults.completions import Body, completion_of, event
from e2e.faults.pace import Pace, Silence
from plait.backends.translation.answer_translator import TurnTranslator

_ENDLESS = b"x" * 2**20
_STREAM_FIELDS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"transfer-encoding", b"chunked"))


class Wire(Protocol):
    """The connection that the answer is written to."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    async def drained(self) -> None:
        """Wait until the peer has read enough to send more."""

    async def end(self, ending: Ending) -> None:
        """End the answer; returns never if it hangs."""


async def answer(
    wire: Wire, body: Body, altered: Altered, pace: Pace, translator: TurnTranslator | None = None
) -> None:
    """Answer a call. A `translator` makes another API's answer of it."""
    if pace.first_s:
        await asyncio.sleep(pace.first_s)
    if body.get("stream"):
        events = _events(body, altered)
        if translator is not None:
            events = list(filter(None, map(translator.feed, events)))
        await _stream(wire, events, Silence(**body.get("silence", {})), altered, pace)
    else:
        await _whole(wire, body, altered, pace, translator)


async def write_raw(wire: Wire, raw: Raw) -> None:
    """Write the bytes, and what else the mode has."""
    if raw.byte_s:
        for at in range(len(raw.data)):
            wire.write(raw.data[at : at + 1])
            await asyncio.sleep(raw.byte_s)
    else:
        wire.write(raw.data)
    for _ in range(raw.times):
        wire.write(raw.filler)
        await wire.drained()
    wire.write(raw.tail)
    await wire.end(raw.ending)


async def _whole(wire: Wire, body: Body, altered: Altered, pace: Pace, translator: TurnTranslator | None) -> None:
    completion = completion_of(body)
    if pace.token_s:
        await asyncio.sleep(pace.token_s * len(completion.tokens))
    fields = completion.whole()
    _alter(fields, altered)
    data = msgspec.json.encode(fields) if altered.body is None else altered.body
    if translator is not None:
        data = translator.whole(data)
    length = b"%d" % (len(data) + altered.length_off)
    head = _head((b"content-type", b"application/json"), (b"content-length", length), *altered.headers)
    if altered.sends is not None:
        data = data[: len(data) * altered.sends // 10]
    wire.write(head + data)
    await wire.end(altered.ending)


async def _stream(wire: Wire, events: Sequence[bytes], silence: Silence, altered: Altered, pace: Pace) -> None:
    wire.write(_head(*_STREAM_FIELDS, *altered.headers))
    await asyncio.sleep(silence.first_s)
    if altered.first:
        wire.write(_chunk(altered.first))
    if not pace.token_s and not altered.middle and not silence.middle_s:
        wire.write(b"".join(map(_chunk, events)))
    else:
        for number, data in enumerate(events):
            if number == 2:
                await _middle(wire, altered)
                await asyncio.sleep(silence.middle_s)
            wire.write(_chunk(data))
            await asyncio.sleep(pace.token_s)
        if len(events) <= 2:
            await _middle(wire, altered)
    if altered.ending is Ending.KEEP:
        wire.write(b"0\r\n\r\n")
    await wire.end(altered.ending)


async def _middle(wire: Wire, altered: Altered) -> None:
    if altered.middle:
        wire.write(_chunk(altered.middle))
    for _ in range(altered.filler_times):
        wire.write(_chunk(_ENDLESS))
        await wire.drained()


def _events(body: Body, altered: Altered) -> list[bytes]:
    """The events that the stream has, up to where the mode breaks it off."""
    completion = completion_of(body)
    chunks = list(completion.chunks())
    _alter(chunks[-1], altered)
    if not altered.ends:
        chunks.pop()
    usage = completion.usage if altered.usage is GOOD else altered.usage
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(completion.usage_chunk(usage))
    events = [event(chunk) for chunk in chunks]
    if altered.done:
        events.append(b"data: [DONE]\n\n")
    return events if altered.sends is None else events[: altered.sends]


def _alter(fields: dict[str, Any], altered: Altered) -> None:
    if altered.finish_reason is not GOOD:
        fields["choices"][0]["finish_reason"] = altered.finish_reason
    if altered.usage is not GOOD and "usage" in fields:
        fields["usage"] = altered.usage
    if altered.choices is not GOOD:
        fields["choices"] = altered.choices


def _head(*fields: tuple[bytes, bytes]) -> bytes:
    return b"HTTP/1.1 200 OK\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % field for field in fields)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
