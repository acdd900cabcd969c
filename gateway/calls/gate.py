"""The asyncio shell of admission. A call that waits for its engine waits here, and its client is told.

A stream that waits gets its status after some seconds, and with the status a comment that says how long the wait is.
Comments follow until the answer comes. They keep the client and proxies from giving up. Headers that are known only
then come as one more comment, and an error comes as an event.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from starlette.types import Message, Send

from plait.backends.errors import NoEngineError, PlaitError
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.rate_leases import RateLeases
from plait.gateway.answers.completions import AnswerForm, error_of
from plait.gateway.asgi import Headers
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
        while delivery.on_wait is not None and not (await asyncio.wait([told], timeout=self._notice_s))[0]:
            await delivery.on_wait(*self.admission.outlook(waiting))
        await told
        return True


def _tell(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)


OURS: Final = b"plait-"
"""Headers with this prefix are told in a comment once the status has gone out."""


class HeldStream:
    """ASGI's send for a stream that may have to wait. `has_begun` says that the client has the status already."""

    def __init__(self, to_client: Send, form: AnswerForm, call_id: str) -> None:
        self.has_begun = False
        self._to_client = to_client
        self._form = form
        self._call_id = call_id
        self._failed_status: int | None = None
        self._parts: list[bytes] = []

    async def waits(self, position: int, expected_s: float) -> None:
        """Tell the client that its call is the tenant's `position`th that waits, and for how long it is expected to."""
        if not self.has_begun:
            self.has_begun = True
            headers: Headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-request-id", self._call_id.encode("latin-1")),
            ]
            await self._to_client({"type": "http.response.start", "status": 200, "headers": headers})
        note = self._form.waiting_event(position, expected_s)
        await self._to_client({"type": "http.response.body", "body": note, "more_body": True})

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        if not self.has_begun:
            await self._to_client(message)
        elif message["type"] == "http.response.start":
            await self._start(message)
        elif self._failed_status is None:
            await self._to_client(message)
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self.fail(error_of(self._failed_status, b"".join(self._parts)))

    async def fail(self, error: PlaitError) -> None:
        """The call has failed. The status has gone out, so the error is an event, and the last one."""
        await self._to_client({"type": "http.response.body", "body": self._form.error_event(error)})

    async def _start(self, message: Message) -> None:
        """An answer begins, to a client that has its status already."""
        if message["status"] != 200:
            self._failed_status = message["status"]
            return
        ours = [name + b"=" + value for name, value in message["headers"] if name.startswith(OURS)]
        note = b": " + b" ".join(ours) + b"\n\n"  # on its own: the events may have to be translated
        await self._to_client({"type": "http.response.body", "body": note, "more_body": True})
