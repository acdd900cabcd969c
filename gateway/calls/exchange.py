"""One call on one engine: sends it, checks the answer, and passes it on as it comes.

Nothing goes to the client before the engine has sent a byte of an answer. Until then the call can move elsewhere.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from starlette.types import Send

from plait.backends.errors import (
    AnswerTooLargeError,
    CallerError,
    EngineBrokenError,
    EngineError,
    EngineStatusError,
    EngineTimeoutError,
)
from plait.backends.http.client import Response
from plait.gateway.asgi import is_event_stream, presented_key, send_whole
from plait.gateway.calls.completion_body import (
    UNKNOWN,
    UsageBounds,
    error_text,
)
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.engine_link import EngineLink
from plait.gateway.calls.event_stream import EventStream
from plait.gateway.calls.open_answers import OpenAnswer, OpenAnswers
from plait.gateway.calls.passed_headers import retry_after_s
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.engine_cache import EngineCache
from plait.gateway.fleet.router import Router
from plait.gateway.metrics import Buckets
from plait.gateway.timer import loop_time_s

MAX_ANSWER_BYTES = 256 * 2**20
"""The longest answer that is not streamed. It is held in memory until its client has it."""

TOO_EARLY = frozenset((408, 425, 429))
"""Statuses below 500 that are not the caller's fault."""

NO_ACCESS = frozenset((401, 403))
"""Statuses that are the gateway's fault if it sent its own key."""


LEAST_WAIT_S = 0.01
"""A client is told how long its call waited in the gateway, reading it included, if it was longer than this."""


@dataclass(slots=True)
class Exchange:
    """A call on the engine that it was booked on. `known` says how the engine reports, and which ids it may get.

    `told` is True once the client was sent something. `ended` is `ok` or `refused` once the engine has said all, though
    the client may not have it yet. `usage` is the usage that the engine reported, and `usage_corrected` says whether it
    was out of bounds. `gaps` takes the times between pieces. `forgotten` is True once nobody waits for the engine any
    more, because it serves later calls.
    """

    booking: Booking
    delivery: Delivery
    link: EngineLink
    known: EngineCache
    router: Router
    gaps: Buckets
    open_answers: OpenAnswers
    sends_client_key: bool
    ended: str | None = None
    told: bool = False
    usage: CallUsage | None = None
    usage_corrected: bool = False
    forgotten: bool = False

    @property
    def engine_id(self) -> str:
        """The engine's name."""
        return self.booking.placement.engine_id

    async def run(self, send: Send) -> str | None:
        """Send the call and pass the answer on. Returns None if it is a whole completion, else what is wrong with it.

        What is wrong is the caller's fault. Raises `EngineError` if the engine is at fault; if the client was told
        something by then, it has been sent an error event too.
        """
        delivery, call = self.delivery, self.booking.call
        age_s = self.booking.sent_s - delivery.arrived_s
        kind, agreement = self.known.kind, self.known.agreement
        placement = self.booking.placement
        body = delivery.body.for_engine(kind, call, placement, age_s, delivery.handle, agreement=agreement)
        task = asyncio.current_task()
        assert task is not None
        self.booking.give_up = partial(self._give_up, task)
        try:
            return await self._send_on(body, send)
        except asyncio.CancelledError:
            if not self.forgotten or task.uncancel():
                raise  # the client has gone, or the gateway is stopping
            raise EngineTimeoutError(f"engine {self.engine_id} serves later calls and has forgotten this one") from None
        finally:
            self.booking.give_up = None

    def _give_up(self, task: asyncio.Task[object]) -> None:
        """The engine serves later calls: stop waiting for its first byte. `asyncio.timeout` would cost 2 us a call."""
        self.booking.give_up, self.forgotten = None, True
        task.cancel()

    async def _send_on(self, body: bytes, send: Send) -> str | None:
        response = await self.link.client.post(
            self.delivery.path, _request_headers(self.delivery, self.link, sends_client_key=self.sends_client_key), body
        )
        try:
            if response.status == 200 and is_event_stream(response.headers):
                return await self._stream(response, send)
            with OpenAnswer(self.open_answers, *filter(None, [self.delivery.held])) as held:
                answer = await _read(self, response, held)
                if response.status == 200:
                    return await self._whole(response, answer, send)
                return await self._refusal(response, bytes(answer), send)
        finally:
            response.abort()

    async def _whole(self, response: Response, answer: bytes | bytearray, send: Send) -> str | None:
        """Check and send an answer that was not streamed."""
        read = self.delivery.form.whole(self.engine_id, answer, _bounds(self))
        self.ended = "ok"
        self.usage, self.usage_corrected, problem = read
        text = self.delivery.text
        if text is not None:
            text.whole(answer)
        self._tell()
        self.booking.client_is_slow = True  # the engine has sent all
        await send_whole(send, response.status, _response_headers(response, self), answer)
        return problem if text is None or problem is not None else text.problem

    async def _stream(self, response: Response, send: Send) -> str | None:
        """Pass whole events on. If the engine fails on the way, an error event ends the stream."""
        stream = self.delivery.form.stream(
            self.engine_id,
            withhold=self.delivery.body.withholds_usage,
            choices=self.delivery.choices,
            bounds=_bounds(self),
        )
        last = b""
        try:
            events = await self._first_events(stream, response)
            self.router.first_token(self.booking, loop_time_s())
            self._tell()
            headers = _response_headers(response, self)
            self.booking.client_is_slow = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            last = await self._pass_on(stream, events, response, send)
            problem = stream.problem
            if isinstance(problem, EngineError) and stream.error is None:
                raise problem
        except EngineError as error:
            if self.told:
                await send({"type": "http.response.body", "body": last + self.delivery.form.error_event(error)})
            raise
        finally:
            self.usage, self.usage_corrected = stream.usage, stream.usage_corrected
            if stream.problem is None:  # also if the client, which has the last event, goes before the engine's end
                self.ended = "ok"
        if isinstance(problem, EngineError):  # the engine's own error event has been passed on
            await send({"type": "http.response.body", "body": last})
            raise problem
        self.ended = "ok"
        await send({"type": "http.response.body", "body": last})
        text = self.delivery.text
        return problem if problem is not None or text is None else text.problem

    async def _first_events(self, stream: EventStream, response: Response) -> bytes:
        """The first whole events. Raises `EngineError` if there is none, or if the engine's error is among them."""
        while True:
            piece = await response.read_chunk()
            events = stream.feed(piece) if piece else stream.end()
            if isinstance(stream.error, EngineError):
                raise stream.error
            if events.strip():
                return events
            if not piece:
                raise EngineBrokenError(f"engine {self.engine_id} ended its stream without an event")

    async def _pass_on(self, stream: EventStream, events: bytes, response: Response, send: Send) -> bytes:
        """Send the events on as they come; returns the last ones, which are sent with the end if it came with them."""
        booking, text = self.booking, self.delivery.text
        progress = self.router.engines[self.engine_id].progress
        clock = asyncio.get_running_loop().time
        last_s = clock()
        while True:
            if text is not None and events:
                text.feed(events)
            if response.is_read:
                break
            if events:
                booking.client_is_slow = True
                await send({"type": "http.response.body", "body": events, "more_body": True})
                booking.client_is_slow = False
            piece = await response.read_chunk()
            if not piece:
                events = b""
                break
            now_s = clock()
            progress.next_byte(booking, now_s)
            self.gaps.observe(now_s - last_s)
            last_s = now_s
            events = stream.feed(piece)
        booking.client_is_slow = True  # the engine has sent all, whatever the client still has to read
        rest = stream.end()
        return events + rest if stream.problem is None else events

    async def _refusal(self, response: Response, answer: bytes, send: Send) -> str:
        """Pass on an error that is the caller's fault. Raises `EngineStatusError` for every other."""
        status, (is_openai, said) = response.status, error_text(answer)
        ours = status in NO_ACCESS and self.link.authorization is not None
        if not 400 <= status < 500 or status in TOO_EARLY or ours:
            shown = 502 if ours or not 429 <= status < 600 else status
            raise EngineStatusError(
                f"engine {self.engine_id} answered with status {status}{said and f': {said}'}",
                shown,
                retry_after_s=retry_after_s(response.headers),
            )
        headers = _response_headers(response, self)
        if not is_openai:
            error = CallerError(said or f"The engine refused the request with status {status}.")
            answer = error.body()
            headers = [item for item in headers if item[0] not in (b"content-type", b"content-encoding")]
            headers.append((b"content-type", b"application/json"))
        self.ended = "refused"
        self._tell()
        await send_whole(send, status, headers, answer)
        return f"refused with status {status}{said and f': {said}'}"

    def _tell(self) -> None:
        """From now on the client has something of this answer, so that the call stays here."""
        self.told, self.booking.give_up = True, None


async def _read(exchange: Exchange, response: Response, held: OpenAnswer) -> bytes | bytearray:
    """The whole body. Its bytes count in the delivery's `held` until it is passed on, and in all until it is sent.

    Raises `AnswerTooLargeError` if all answers together have too many. The engine is not at fault.
    """
    try:
        return await response.gather(MAX_ANSWER_BYTES, held.hold)
    except AnswerTooLargeError:
        exchange.ended = "refused"
        raise
    finally:
        if exchange.delivery.held is not None:
            held.end_in(exchange.delivery.held)


def _bounds(exchange: Exchange) -> UsageBounds:
    """The most tokens that this call can have used."""
    delivery, context_tokens = exchange.delivery, exchange.delivery.context_tokens
    if context_tokens is None:
        return UNKNOWN
    limit = exchange.booking.call.output_limit
    each = context_tokens if limit is None else min(context_tokens, limit)
    return UsageBounds(context_tokens * delivery.prompts, each * delivery.choices)


def _request_headers(delivery: Delivery, link: EngineLink, *, sends_client_key: bool) -> list[tuple[bytes, bytes]]:
    headers = link.passed.of_request(delivery.headers)
    headers.append((b"x-request-id", delivery.call.call_id.encode("latin-1")))
    if link.authorization is not None:
        headers.append((b"authorization", link.authorization))
    elif sends_client_key:
        key = presented_key(delivery.headers)
        headers += [(b"authorization", b"Bearer " + key)] if key else []
    return headers


def _response_headers(response: Response, exchange: Exchange) -> list[tuple[bytes, bytes]]:
    booking, session = exchange.booking, exchange.delivery.session
    placement = booking.placement
    more = [] if session is None else [(b"plait-session", session.encode("latin-1"))]
    waited_s = booking.sent_s - exchange.delivery.arrived_s
    if waited_s >= LEAST_WAIT_S:
        more.append((b"plait-waited-s", b"%.3f" % waited_s))
    if placement.is_at_risk:
        more.append((b"plait-slo", b"at-risk"))
    return [
        *exchange.link.passed.of_answer(response.headers),
        (b"x-request-id", booking.call.call_id.encode("latin-1")),
        (b"plait-engine", placement.engine_id.encode("latin-1")),
        (b"plait-placement", placement.reason.encode()),
        (b"plait-cached-tokens", str(placement.cached_tokens).encode()),
        *more,
    ]
