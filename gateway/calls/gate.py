"""Where calls wait for their engines, or for their sessions, and the sink of a stream whose client is told so.

`silent_streams` says when it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from plait.backends.errors import EngineGarbledError, PlaitError
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.rate_leases import RateLeases
from plait.gateway.answers.completions import AnswerForm
from plait.gateway.answers.error_texts import error_of
from plait.gateway.asgi import EVENT_STREAM, Headers, Sink
from plait.gateway.calls.delivery import Delivery
from plait.gateway.timer import loop_time_s

EXPECTED_OUTPUT_TOKENS = 128
"""Counted for a call whose output limit is larger or absent, until it has ended."""

Resume = Callable[[Exception | None], None]


class Gate:
    """Places calls, and lets them through when their engines have room.

    A client that cannot be told while its call waits is kept waiting for `hold_s`, and then told to come back.
    """

    def __init__(self, admission: Admission, hold_s: float) -> None:
        self.admission = admission
        self.leases: RateLeases | None = None
        """Where several gateways share the rates of tenants."""
        self._hold_s = hold_s

    def enter(self, delivery: Delivery, prefer: str | None, resume: Resume) -> Waiting:
        """Let the call through: it is sent now if that says so. Raises `PlaitError` for one that is refused.

        If it has to wait, `resume` is called once it is to be sent, or with the error of a call that is not. `gone` has
        to follow if its client goes before. It continues one that ran on the engine that it may `prefer`.
        """
        call = delivery.call
        limit = call.output_limit
        each_tokens = limit if limit and limit < EXPECTED_OUTPUT_TOKENS else EXPECTED_OUTPUT_TOKENS
        output_tokens = each_tokens * delivery.choices
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
        if self.leases is not None and not self.admission.has_place(waiting):
            delivery.leasing = asyncio.ensure_future(self._lease(self.leases, delivery, waiting, resume))
            return waiting
        self.admission.enter(waiting, loop_time_s())
        if not waiting.is_sent:
            self._wait(delivery, waiting, resume)
        return waiting

    def _wait(self, delivery: Delivery, waiting: Waiting, resume: Resume) -> None:
        """A call has to wait. Raises its error if it has one already."""
        if waiting.error is not None:
            raise waiting.error
        waiting.tell = partial(self._told, delivery, waiting, resume)
        if delivery.may_leave:
            delivery.timer = asyncio.get_running_loop().call_later(self._hold_s, self._leave, delivery, waiting, resume)

    async def _lease(self, leases: RateLeases, delivery: Delivery, waiting: Waiting, resume: Resume) -> None:
        """Admit a call that the gateways' store allows."""
        try:
            waiting.is_leased = await leases.take(waiting.tenant, waiting.tokens)
            try:
                self.admission.enter(waiting, loop_time_s())
                if not waiting.is_sent:
                    self._wait(delivery, waiting, resume)
            except PlaitError:  # a call that is refused there has not used what was leased for it
                if waiting.is_leased:
                    leases.put_back(waiting.tenant, waiting.tokens)
                raise
        except Exception as error:  # noqa: BLE001 - an error, or a defect: the call ends
            delivery.leasing = None
            resume(error)
        else:
            delivery.leasing = None
            if waiting.is_sent:
                resume(None)

    def outlook(self, delivery: Delivery) -> str | None:
        """For people: a waiting call's place among its tenant's, and the seconds that it has to wait; else None."""
        waiting = delivery.waiting
        if waiting is None or waiting.tell is None or waiting.is_sent or waiting.error is not None:
            return None
        position, expected_s = self.admission.outlook(waiting)
        return f"waiting position={position} expected_s={round(expected_s)}"

    def gone(self, delivery: Delivery) -> None:
        """The client of a call has gone before it was sent, or in that moment."""
        waiting = delivery.waiting
        if delivery.timer is not None:
            delivery.timer.cancel()
        if delivery.leasing is not None:
            delivery.leasing.cancel()
        elif waiting is not None and waiting.tell is not None:
            waiting.tell = None
            self.admission.gone(waiting, loop_time_s())

    def _told(self, delivery: Delivery, waiting: Waiting, resume: Resume) -> None:
        """A call that waits is to be sent, or has an error. It goes on once the event is over."""
        if delivery.timer is not None:
            delivery.timer.cancel()
        delivery.timer = asyncio.get_running_loop().call_soon(self._resume, delivery, waiting, resume)

    def _resume(self, delivery: Delivery, waiting: Waiting, resume: Resume) -> None:
        delivery.timer = waiting.tell = None
        resume(waiting.error)

    def _leave(self, delivery: Delivery, waiting: Waiting, resume: Resume) -> None:
        """The client has waited for long enough: it may come back."""
        error = self.admission.leave(waiting, loop_time_s())
        delivery.timer = waiting.tell = None
        resume(error)


OURS: Final = b"plait-"
"""Headers with this prefix are told in a comment once the status has gone out."""


class HeldStream:
    """The sink of a stream that has to wait. `has_begun` says that the client has the status already.

    Headers that are known only later come as a comment, and an error comes as an event.
    """

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

    @property
    def is_drained(self) -> bool:
        """Whether the client has been sent all that was written."""
        return self._sink.is_drained

    def tell(self, comment: str) -> None:
        """Tell the client that its call goes on."""
        if not self.has_begun:
            self.has_begun = True
            self._sink.start(200, [*EVENT_STREAM, (b"x-request-id", self._call_id.encode("latin-1"))])
        self._sink.write(self._form.sign_of_life(comment, has_begun=False))

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """All of an answer. Its client may have a status already, and expects events then."""
        if self.has_begun and status == 200:
            self.fail(EngineGarbledError("The engine answered without a stream."))
        elif self.has_begun:
            self.start(status, headers)
            self.end(bytes(body))
        else:
            self._sink.whole(status, headers, body)

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

    def end(self, body: bytes = b"") -> None:
        """The last piece of the body."""
        if self._failed_status is None:
            self._sink.end(body)
        else:
            self.fail(error_of(self._failed_status, b"".join([*self._parts, body])))

    def fail(self, error: PlaitError) -> None:
        """The call has failed. The status has gone out, so the error is an event, and the last one."""
        self._sink.end(self._form.error_event(error))
