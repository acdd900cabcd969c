"""The asyncio shell of admission. A call that waits for its engine waits here, and its client is told.

A stream that waits gets its status after some seconds, and with the status a comment that says how long the wait is.
Comments follow until the answer comes. They keep the client and proxies from giving up. Headers that are known only
then come as one more comment, and an error comes as an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from plait.backends.errors import NoEngineError, PlaitError
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.rate_leases import RateLeases
from plait.gateway.answers.completions import AnswerForm, error_of
from plait.gateway.asgi import Headers, Sink
from plait.gateway.calls.delivery import Delivery
from plait.gateway.fleet.booking import Booking
from plait.gateway.timer import loop_time_s

EXPECTED_OUTPUT_TOKENS = 128
"""Counted for a call whose output limit is larger or absent, until it has ended."""

NOTICE_S = 10.0
"""Clients and proxies give up after a minute without a byte, some after less."""


class Gate:
    """Places calls, and lets them through when their engines have room.

    A client that can be told while its call waits is told every `notice_s`. Another one is kept waiting for `hold_s`,
    and then told to come back.
    """

    def __init__(self, admission: Admission, hold_s: float, notice_s: float = NOTICE_S) -> None:
        self.admission = admission
        self.leases: RateLeases | None = None
        """Where several gateways share the rates of tenants."""
        self._hold_s = hold_s
        self._notice_s = notice_s

    async def enter(self, delivery: Delivery, prefer: str | None) -> Booking:
        """Return the call's booking once it is to be sent; `left` has to follow. Raises `PlaitError` otherwise.

        It continues one that ran on the engine that it may `prefer`.
        """
        call = delivery.call
        output_tokens = min(EXPECTED_OUTPUT_TOKENS, call.output_limit or EXPECTED_OUTPUT_TOKENS) * delivery.choices
        waiting = delivery.waiting = Waiting(
            delivery.tenant,
            call.prompt_tokens + output_tokens,
            call=call,
            output_tokens=output_tokens,
            prefer=prefer,
            avoid=delivery.avoids,
            route=delivery.route,
            session=delivery.turn_of,
            passes=delivery.output is not None or delivery.held_s is not None or call.group is not None,
        )
        try:
            if self.leases is not None and not self.admission.has_place(waiting):
                waiting.is_leased = await self.leases.take(waiting.tenant, waiting.tokens)
            try:
                self.admission.enter(waiting, loop_time_s())
            except PlaitError:  # a call that is refused there has not used what was leased for it
                if self.leases is not None and waiting.is_leased:
                    self.leases.put_back(waiting.tenant, waiting.tokens)
                raise
            if not waiting.is_sent:
                await self._told(waiting, delivery)
        except PlaitError as error:
            delivery.outcome = "no_engine" if isinstance(error, NoEngineError) else "refused"
            raise
        assert waiting.booking is not None
        return waiting.booking

    def left(self, delivery: Delivery, now_s: float) -> None:
        """A call has ended; no effect if it was not let through."""
        waiting, usage = delivery.waiting, delivery.usage
        if waiting is not None and waiting.is_sent:
            self.admission.left(waiting, None if usage is None else usage.prompt_tokens + usage.output_tokens, now_s)

    async def _told(self, waiting: Waiting, delivery: Delivery) -> None:
        told = asyncio.get_running_loop().create_future()
        waiting.tell = partial(_tell, told)
        if waiting.error is None:
            try:
                is_told = await self._hold(told, waiting, delivery)
            except asyncio.CancelledError:  # the client has gone, or the gateway is stopping
                self.admission.gone(waiting, loop_time_s())
                raise
            if not is_told:
                raise self.admission.leave(waiting, loop_time_s())
        if waiting.error is not None:
            raise waiting.error

    async def _hold(self, told: asyncio.Future[None], waiting: Waiting, delivery: Delivery) -> bool:
        """Wait until the call is told, and tell its client; False if it may leave and has waited for long enough."""
        if delivery.may_leave:
            return bool((await asyncio.wait([told], timeout=self._hold_s))[0])
        stream = delivery.held_stream
        while stream is not None and not (await asyncio.wait([told], timeout=self._notice_s))[0]:
            stream.waits(*self.admission.outlook(waiting))
            await stream.flush()
        await told
        return True


def _tell(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)


OURS: Final = b"plait-"
"""Headers with this prefix are told in a comment once the status has gone out."""


class HeldStream:
    """The sink of a stream that has to wait. `has_begun` says that the client has the status already."""

    def __init__(self, sink: Sink, form: AnswerForm, call_id: str) -> None:
        self.has_begun = False
        self._sink = sink
        self._form = form
        self._call_id = call_id
        self._failed_status: int | None = None
        self._parts: list[bytes] = []
        self.flush = sink.flush

    @property
    def on_room(self) -> Callable[[], None] | None:
        """Of the client's sink."""
        return self._sink.on_room

    @on_room.setter
    def on_room(self, on_room: Callable[[], None] | None) -> None:
        self._sink.on_room = on_room

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before more is written."""
        return self._sink.is_full

    def waits(self, position: int, expected_s: float) -> None:
        """Tell the client that its call is the tenant's `position`th that waits, and for how long it is expected to."""
        if not self.has_begun:
            self.has_begun = True
            headers: Headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-request-id", self._call_id.encode("latin-1")),
            ]
            self._sink.start(200, headers)
        self._sink.write(self._form.waiting_event(position, expected_s))

    def start(self, status: int, headers: Headers) -> None:
        """An answer begins. Its client may have a status already."""
        if not self.has_begun:
            self._sink.start(status, headers)
        elif status != 200:
            self._failed_status = status
        else:
            ours = [name + b"=" + value for name, value in headers if name.startswith(OURS)]
            self._sink.write(b": " + b" ".join(ours) + b"\n\n")  # on its own: the events may have to be translated

    def write(self, body: bytes) -> None:
        """A piece of the body."""
        if self._failed_status is None:
            self._sink.write(body)
        else:
            self._parts.append(body)

    def end(self, body: bytes | bytearray = b"") -> None:
        """The last piece of the body."""
        if self._failed_status is None:
            self._sink.end(body)
        else:
            self.fail(error_of(self._failed_status, b"".join([*self._parts, body])))

    def fail(self, error: PlaitError) -> None:
        """The call has failed. The status has gone out, so the error is an event, and the last one."""
        self._sink.end(self._form.error_event(error))
