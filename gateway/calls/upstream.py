"""The engine's side of a call: sends it, checks the answer, and passes the answer on as it comes.

Nothing goes to the client before the engine has sent a byte of an answer. Until then the call can move elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
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
from plait.backends.http.connection import is_event_stream
from plait.gateway.answers.completions import EventStream, error_text
from plait.gateway.asgi import Headers, presented_key, send_whole
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.metrics import FastHistogram
from plait.gateway.calls.open_bodies import OpenAnswer, OpenAnswers
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import TOO_EARLY, retry_after_s
from plait.gateway.timer import loop_time_s

MAX_ANSWER_BYTES = 256 * 2**20
"""The longest answer that is not streamed. It is held in memory until its client has it."""

LEAST_WAIT_S = 0.01
"""A client is told how long its call waited in the gateway, reading it included, if it was longer than this."""

_USUAL = frozenset((b"keep-alive", b"close"))


class Upstream:
    """Sends calls to the engines that they are booked on. `gaps` takes the times between the pieces of a stream.

    With `forward_client_key`, engines without a key of their own get the client's bearer token.
    """

    def __init__(
        self, router: Router, gaps: FastHistogram, open_answers: OpenAnswers, *, forward_client_key: bool
    ) -> None:
        self.open_answers = open_answers
        self._router = router
        self._gaps = gaps
        self._forward_client_key = forward_client_key

    async def send(self, delivery: Delivery, send: Send) -> None:
        """Send the call and pass the answer on. What is wrong with it by the caller's fault is the `problem`.

        Raises `EngineError` if the engine is at fault. A client that was told something by then has been sent an error
        event too.
        """
        booking, link, task = delivery.booking, delivery.link, asyncio.current_task()
        assert booking is not None
        assert link is not None
        assert task is not None
        cache, age_s = self._router.engines[delivery.engine_id].cache, booking.sent_s - delivery.arrived_s
        call, placement = booking.call, booking.placement
        body = delivery.body.for_engine(
            cache.kind, call, placement, age_s, delivery.handle, agreement=cache.agreement
        )  # fmt: skip
        booking.give_up = partial(_give_up, delivery, task)
        response = None
        try:
            response = await link.client.request("POST", delivery.path, self._request_headers(delivery), body)
            if response.status == 200 and is_event_stream(response.headers):
                await self._stream(delivery, response, send)
            else:
                await self._whole(delivery, response, send)
        except asyncio.CancelledError:
            if not delivery.forgotten or task.uncancel():
                raise  # the client has gone, or the gateway is stopping
            text = f"engine {delivery.engine_id} serves later calls and has forgotten this one"
            raise EngineTimeoutError(text) from None
        finally:
            booking.give_up = None
            if response is not None and response.source is not None:  # more may come
                response.abort()

    def _request_headers(self, delivery: Delivery) -> list[tuple[bytes, bytes]]:
        link = delivery.link
        assert link is not None
        headers = passed(delivery.headers, link.passed.to_engines)
        headers.append((b"x-request-id", delivery.call.call_id.encode("latin-1")))
        if link.authorization is not None:
            headers.append((b"authorization", link.authorization))
        elif self._forward_client_key and (key := presented_key(delivery.headers)):
            headers.append((b"authorization", b"Bearer " + key))
        return headers

    # An answer that is not streamed.

    async def _whole(self, delivery: Delivery, response: Response, send: Send) -> None:
        """Check an answer and send it. Its bytes count in `open_answers` until it is sent."""
        try:
            answer = await self._gathered(delivery, response)
            if response.status != 200:
                await _refuse(delivery, response, bytes(answer), send)
                return
            read = delivery.form.whole(delivery.engine_id, answer, delivery.bounds)
            delivery.ended = "ok"
            delivery.usage, delivery.usage_corrected, problem, delivery.finish = read
            text = delivery.text
            if text is not None:
                text.whole(answer)
            headers = _start(delivery, response)
            await send_whole(send, 200, headers, answer)
            delivery.problem = problem if text is None or problem is not None else text.problem
        finally:
            self.open_answers.free(delivery.held_bytes)
            delivery.held_bytes = 0

    async def _gathered(self, delivery: Delivery, response: Response) -> bytes | bytearray:
        """The whole body. Its bytes count in the delivery's `held`, too, until it is passed on.

        Raises `AnswerTooLargeError` if all answers together have too many. The engine is not at fault.
        """
        held = None if delivery.held is None else OpenAnswer(delivery.held)
        try:
            return await response.gather(MAX_ANSWER_BYTES, partial(self._hold, delivery, held))
        except AnswerTooLargeError:
            delivery.ended = "refused"
            raise
        finally:
            if held is not None:
                held.end()

    def _hold(self, delivery: Delivery, held: OpenAnswer | None, size_bytes: int) -> None:
        self.open_answers.hold(size_bytes)
        delivery.held_bytes += size_bytes
        if held is not None:
            held.hold(size_bytes)

    # A stream.

    async def _stream(self, delivery: Delivery, response: Response, send: Send) -> None:
        """Pass whole events on. If the engine fails on the way, an error event ends the stream."""
        booking, form, last = delivery.booking, delivery.form, b""
        assert booking is not None
        stream = form.stream(
            delivery.engine_id,
            withhold=delivery.body.withholds_usage,
            choices=delivery.choices,
            bounds=delivery.bounds,
        )
        try:
            events = await _first_events(stream, response, delivery.engine_id)
            self._router.first_token(booking, loop_time_s())
            headers = _start(delivery, response)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            last, problem = await self._pass_on(delivery, stream, events, response, send)
            if isinstance(problem, EngineError) and stream.error is None:
                raise problem
        except EngineError as error:
            if delivery.response_started:
                await send({"type": "http.response.body", "body": last + form.error_event(error)})
            raise
        finally:
            delivery.usage, delivery.usage_corrected = stream.usage, stream.usage_corrected
            delivery.finish = stream.finish
            if stream.problem is None:  # also if the client, which has the last event, goes before the engine's end
                delivery.ended = "ok"
        if isinstance(problem, EngineError):  # the engine's own error event has been passed on
            await send({"type": "http.response.body", "body": last})
            raise problem
        delivery.ended = "ok"
        await send({"type": "http.response.body", "body": last})
        text = delivery.text
        delivery.problem = problem if problem is not None or text is None else text.problem

    async def _pass_on(
        self, delivery: Delivery, stream: EventStream, events: bytes, response: Response, send: Send
    ) -> tuple[bytes, EngineError | str | None]:
        """Send the events on as they come; returns the last ones, which are sent with the end if it came with them.

        With them comes the problem of the stream, if it has one.
        """
        booking, text = delivery.booking, delivery.text
        assert booking is not None
        progress = self._router.engines[delivery.engine_id].progress
        gaps = self._gaps.of[delivery.call.model, delivery.engine_id]
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
            gaps.observe(now_s - last_s)
            last_s = now_s
            events = stream.feed(piece)
        booking.client_is_slow = True  # the engine has sent all, whatever the client still has to read
        rest, problem = stream.end(), stream.problem
        return events + rest if problem is None else events, problem


async def _first_events(stream: EventStream, response: Response, engine_id: str) -> bytes:
    """The first whole events. Raises `EngineError` if there is none, or if the engine's error is among them."""
    while True:
        piece = await response.read_chunk()
        events = stream.feed(piece) if piece else stream.end()
        if isinstance(stream.error, EngineError):
            raise stream.error
        if events.strip():
            return events
        if not piece:
            raise EngineBrokenError(f"engine {engine_id} ended its stream without an event")


async def _refuse(delivery: Delivery, response: Response, answer: bytes, send: Send) -> None:
    """Pass on an error that is the caller's fault. Raises `EngineStatusError` for every other."""
    link, status, (is_openai, said) = delivery.link, response.status, error_text(answer)
    assert link is not None
    ours = link.refused_ours(status)
    if not 400 <= status < 500 or status in TOO_EARLY or ours:
        shown = 502 if ours or not 429 <= status < 600 else status
        raise EngineStatusError(
            f"engine {delivery.engine_id} answered with status {status}{said and f': {said}'}",
            shown,
            retry_after_s=retry_after_s(response.headers),
        )
    delivery.ended, delivery.engine_status = "refused", status
    headers = _start(delivery, response)
    if not is_openai:
        error = CallerError(said or f"The engine refused the request with status {status}.")
        answer = error.body()
        headers = [item for item in headers if item[0] not in (b"content-type", b"content-encoding")]
        headers.append((b"content-type", b"application/json"))
    await send_whole(send, status, headers, answer)
    delivery.problem = f"refused with status {status}{said and f': {said}'}"


def _start(delivery: Delivery, response: Response) -> list[tuple[bytes, bytes]]:
    """The headers of the answer, which the client gets now: from here on the call stays with this attempt."""
    booking, link = delivery.booking, delivery.link
    assert booking is not None
    assert link is not None
    delivery.response_started, booking.give_up = True, None
    booking.client_is_slow = True  # until it has taken what is sent
    placement = booking.placement
    headers = passed(response.headers, link.passed.to_clients)
    headers += [
        (b"x-request-id", booking.call.call_id.encode("latin-1")),
        (b"plait-engine", placement.engine_id.encode("latin-1")),
        (b"plait-placement", placement.reason.encode()),
        (b"plait-cached-tokens", b"%d" % placement.cached_tokens),
    ]
    if delivery.session is not None:
        headers.append((b"plait-session", delivery.session.encode("latin-1")))
    waited_s = booking.sent_s - delivery.arrived_s
    if waited_s >= LEAST_WAIT_S:
        headers.append((b"plait-waited-s", b"%.3f" % waited_s))
    if placement.meets_ttft is not None:
        headers.append((b"plait-slo", b"expected" if placement.meets_ttft else b"at-risk"))
    return headers


def passed(headers: Headers, names: Container[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers with these names, but for those of the last hop alone (RFC 9110, 7.6.1)."""
    found, hop = [], None
    for item in headers:
        name, value = item
        if name in names:
            found.append(item)
        elif name == b"connection" and value.lower() not in _USUAL:
            hop = value if hop is None else hop + b"," + value
    if hop is None:
        return found
    of_hop = {name.strip().lower() for name in hop.split(b",")}
    return [item for item in found if item[0] not in of_hop]


def _give_up(delivery: Delivery, task: asyncio.Task[object]) -> None:
    """The engine serves later calls: stop waiting for its first byte. `asyncio.timeout` would cost 2 us a call."""
    assert delivery.booking is not None
    delivery.booking.give_up, delivery.forgotten = None, True
    task.cancel()
