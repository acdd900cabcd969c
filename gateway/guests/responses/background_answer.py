"""The events of a background response. Any number of readers follow them, each from a sequence number of its choice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.types import Message

from plait.backends.errors import EngineGarbledError, PlaitError
from plait.backends.http.content_types import is_event_stream
from plait.backends.protocol.api_errors import response_error, write_event
from plait.backends.translation.answer_translator import Identity, TurnTranslator
from plait.backends.translation.background_turn import BackgroundTurn
from plait.gateway.answers.error_texts import error_of
from plait.gateway.asgi import EVENT_STREAM, ClientSink, Headers, MessageSink
from plait.gateway.guests.programs.recorded_answer import KEEP_ALIVE, Ledger

EVENT_BYTES: Final = 64
"""The memory of an event besides its bytes: an object and a place in a list."""

Told = Callable[[list[bytes]], Awaitable[list[bytes]]]
"""Waits for the commit of the response. Returns the last events, marked if it failed, or raises `PlaitError`."""


class BackgroundAnswer(MessageSink):
    """The sink of the engine's chat stream, which it translates to events of a response.

    The events from the response's end on are held back until `finish`, which waits for the store.
    """

    def __init__(self, fields: Mapping[str, Any], identity: Identity, ledger: Ledger) -> None:
        self._fields = fields
        self._identity = identity
        self._ledger = ledger
        self._held_bytes = 0
        self._readers: list[_Reader] = []
        self._told: Told | None = None  # set when the response has ended
        self._error: PlaitError | None = None  # set if the response does not end in this gateway
        self._begin()

    def _begin(self) -> None:
        self._turn = BackgroundTurn(self._fields, self._identity)
        self._translator = TurnTranslator(self._turn)
        self._events = list(map(write_event, self._turn.queue()))
        self._last: list[bytes] = []  # the events from the response's end on
        self._status = 200
        self._is_stream = False
        self._refusal = b""

    def put(self, message: Message) -> None:
        """Raises `PlaitError` beyond the tenant's limit, and for an event that cannot be translated."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = self._status == 200 and is_event_stream(message["headers"])
        elif self._is_stream:
            told = self._translator.told(message.get("body", b""))
            self._add([event for event in told if not event.startswith(b":")])
            if self._translator.problem is not None:
                raise self._translator.problem
        else:
            self._refusal += message.get("body", b"")

    def take_back(self) -> None:
        """Discard the events, because the response is generated again. Readers go on at their sequence numbers."""
        self._ledger.free(self._held_bytes)
        self._held_bytes = 0
        self._begin()

    @property
    def response(self) -> bytes:
        return msgspec.json.encode(self._turn.answer())

    @property
    def problem(self) -> PlaitError | None:
        """The error of an answer that is no whole response; None if it is whole."""
        if self._turn.is_over:
            return None
        if self._status != 200:
            return error_of(self._status, self._refusal)
        return EngineGarbledError("The engine's answer is no stream of a chat completion.")

    def fail(self, error: PlaitError) -> None:
        self._end(lambda: self._turn.fail(error.error_object))

    def cancel(self) -> None:
        """End the response as cancelled, unless it has ended before."""
        self._end(self._turn.cancel)

    def finish(self, told: Told) -> None:
        """The response has ended. Readers get the last events from `told`."""
        self._told = told
        self._end_readers()

    def break_off(self, error: PlaitError) -> None:
        """The response does not end in this gateway. Readers get an error event."""
        self._error = error
        self._end_readers()

    async def follow(self, sink: ClientSink, headers: Headers, number: int, keep_alive_s: float) -> None:
        """Send the events from a sequence number on as they come, and comments in silences of `keep_alive_s`."""
        await sink.send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM, *headers]})
        if self._told is None and self._error is None:
            reader = _Reader(sink, number, keep_alive_s)
            self._readers.append(reader)
            sink.on_room = lambda: reader.take(self._events)
            try:
                reader.take(self._events)
                await sink.flush(reader.ended)
            finally:
                self._readers.remove(reader)
                reader.close()
            number = reader.number
        sink.end(await self._end_from(number))
        await sink.flush()

    async def _end_from(self, number: int) -> bytes:
        error, events = self._error, [*self._events, *self._last]
        if error is None and self._told is not None:
            try:
                return b"".join(await self._told(events_from(number, events)))
            except PlaitError as unstored:
                error = unstored
        assert error is not None
        return write_event(response_error(error.error_object, number))

    def _end(self, events: Callable[[], Any]) -> None:
        if not self._turn.is_over:
            self._last += map(write_event, events())

    def _add(self, events: list[bytes]) -> None:
        if self._turn.is_over:
            self._last += events
        elif events:
            more_bytes = sum(map(len, events)) + EVENT_BYTES * len(events)
            self._ledger.hold(more_bytes)
            self._held_bytes += more_bytes
            self._events += events
            for reader in self._readers:
                reader.take(self._events)

    def _end_readers(self) -> None:
        for reader in self._readers:
            reader.end()


class _Reader:
    """A client, and the `number` of the next event that it gets. `ended`: it gets the rest by `_end_from`."""

    def __init__(self, sink: ClientSink, number: int, keep_alive_s: float) -> None:
        self.number = number
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._sink = sink
        self._keep_alive_s = keep_alive_s
        self._written_s = self._loop.time()
        self._timer = self._loop.call_later(keep_alive_s, self._look)

    def take(self, events: list[bytes]) -> None:
        """Write what it has not had of all events so far, if there is room."""
        if self.number < len(events) and not self._sink.is_full:
            new, self.number = events[self.number :], len(events)
            self._written_s = self._loop.time()
            self._sink.write(b"".join(new))

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        self._timer.cancel()
        self._sink.on_room = None

    def _look(self) -> None:
        """Write a comment after a silence, if there is room."""
        now_s = self._loop.time()
        if now_s >= self._written_s + self._keep_alive_s:
            self._written_s = now_s
            if not self._sink.is_full:
                self._sink.write(KEEP_ALIVE)
        self._timer = self._loop.call_at(self._written_s + self._keep_alive_s, self._look)


def events_from(number: int, events: list[bytes]) -> list[bytes]:
    """The events of an ended response from a sequence number on; at least the last one.

    A reader may be beyond the end: it has read a longer text before the response was generated again.
    """
    return events[number:] if number <= len(events) else events[-1:]
