"""The engine's side of a call: sends it, checks the answer, and passes the answer on as it comes.

An `Exchange` is driven by events: the response has news, or its client has room. Nothing goes to the client before the
engine has sent a byte of an answer. Until then the call can move elsewhere.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import compress
from typing import Final

import msgspec
import structlog

from plait.backends.errors import (
    AnswerTooLargeError,
    CallerError,
    EngineBrokenError,
    EngineError,
    EngineLostError,
    EngineStatusError,
    PlaitError,
)
from plait.backends.http.client import Response
from plait.backends.http.connection import Gathered, is_event_stream
from plait.backends.protocol.surrogates import with_whole_pairs
from plait.gateway.answers.completions import EventStream
from plait.gateway.answers.error_texts import error_text
from plait.gateway.answers.refusals import Lack, LackError, lack_of
from plait.gateway.asgi import NAME, UNBUFFERED, Headers, OnEnd, Sink, presented_keys
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.metrics import Buckets, FastHistogram
from plait.gateway.calls.open_answers import OpenAnswer, OpenAnswers
from plait.gateway.calls.request_faults import NOT_SUPPORTED, RequestFaults
from plait.gateway.fleet.booking import Booking, Progress
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import TOO_EARLY, retry_after_s
from plait.gateway.timer import loop_time_s
from plait.policy.types import NO_SLO

MAX_ANSWER_BYTES = 256 * 2**20
"""The longest answer that is not streamed. It is held in memory until its client has it."""

LEAST_WAIT_S = 0.01
"""A client is told how long its call waited in the gateway, reading it included, if it was longer than this."""

log = structlog.get_logger(__name__)

NO_RETRY: Final = (b"x-should-retry", b"false")
"""Tells the SDKs of OpenAI and Anthropic not to try again, as they do for any 5xx."""

_USUAL: Final = frozenset((b"keep-alive", b"close"))


class Upstream:
    """Sends calls to the engines that they are booked on. `gaps` takes the times between the pieces of a stream.

    `faults` tells requests that are at fault from engines that are.
    With `forward_client_key`, engines without a key of their own get the client's bearer token.
    """

    def __init__(
        self,
        router: Router,
        gaps: FastHistogram,
        open_answers: OpenAnswers,
        faults: RequestFaults,
        *,
        forward_client_key: bool,
    ) -> None:
        self.faults = faults
        self.open_answers = open_answers
        self.gaps = gaps
        self.router = router
        self._forward_client_key = forward_client_key

    def send(self, delivery: Delivery, on_end: OnEnd) -> Exchange:
        """Send the call and pass the answer on. `on_end` is called once the answer has ended, with its error.

        What is wrong with it by the caller's fault is the `problem`. If the engine is at fault, the error is an
        `EngineError`; a client that was told something by then has been sent an error event too.
        """
        booking, link, sink = delivery.booking, delivery.link, delivery.sink
        assert booking is not None
        assert link is not None
        cache, age_s = self.router.engines[delivery.engine_id].cache, booking.sent_s - delivery.arrived_s
        call, placement = booking.call, booking.placement
        body = delivery.body.for_engine(
            cache.kind, call, placement, age_s, delivery.handle, agreement=cache.agreement
        )  # fmt: skip
        headers = passed(delivery.headers, link.passed.to_engines)
        headers.append((b"x-request-id", call.call_id.encode("latin-1")))
        if link.authorization is not None:
            headers.append((b"authorization", link.authorization))
        elif self._forward_client_key and (keys := presented_keys(delivery.headers)):
            headers.append((b"authorization", b"Bearer " + keys[0]))
        response = link.client.begin("POST", delivery.path, headers, body)
        exchange = Exchange(self, delivery, booking, response, sink, on_end)
        response.on_news, sink.on_room, booking.give_up = exchange.advance, exchange.has_room, exchange.give_up
        return exchange


class Exchange(msgspec.Struct, eq=False):
    """An engine's `response` to a call, on its way to the client's `sink`.

    `on_end` is called once the client has all of the answer, or the error is known that the answer ended with.
    """

    _upstream: Upstream
    _delivery: Delivery
    _booking: Booking
    _response: Response
    _sink: Sink
    _on_end: OnEnd | None
    _stream: EventStream | None = None  # of a streamed answer
    _gaps: Buckets | None = None  # take the times between its pieces
    _progress: Progress | None = None  # of its engine
    _body: Gathered | None = None  # of another one
    _held: OpenAnswer | None = None  # counts this body where it is held for the call
    _begun: bool = False  # the client has been sent something of a stream
    _is_written: bool = False  # the client has to read the rest

    def give_up(self, error: EngineError) -> None:
        """Wait for more of the answer no longer. A call that is only better tried elsewhere moves once."""
        is_moved = isinstance(error, EngineLostError) and bool(self._delivery.failures)
        if self._response.source is not None and not is_moved:
            self._response.source.fail(error)

    @property
    def has_last_event(self) -> bool:
        """Whether the client has the last event of a stream, although the engine has not ended it."""
        stream = self._stream
        return stream is not None and (stream.problem is None or stream.error is not None)

    def redirect(self, sink: Sink) -> None:
        """Nothing of the answer has come so far. From now on it goes to this sink."""
        self._sink = sink
        sink.on_room = self.has_room

    def close(self) -> None:
        """The exchange is over, whether or not the answer has ended. What the engine has said of itself is kept."""
        delivery, response, stream = self._delivery, self._response, self._stream
        self._on_end = response.on_news = self._sink.on_room = self._booking.give_up = None
        if response.source is not None:  # more may come
            response.abort()
        if stream is not None:
            delivery.usage, delivery.usage_corrected = stream.usage, stream.usage_corrected
            delivery.finish = stream.finish
            if stream.problem is None:  # also if the client, which has the last event, goes before the engine's end
                delivery.ended = "ok"
        if delivery.held_bytes:
            self._upstream.open_answers.free(delivery.held_bytes)
            delivery.held_bytes = 0
        if self._held is not None:
            self._held.end()

    # Events.

    def advance(self) -> None:
        """Something has come of the response, or it has ended, or the client has room for more."""
        try:
            if self._is_written:
                self._written()
            elif self._stream is not None:
                self._pass_on(self._stream)
            elif self._body is not None:
                self._gather(self._body)
            else:
                self._read_head()
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            if self._on_end is None:  # the call has ended
                raise
            self.end(error)  # by a defect, because the answer is not wanted, or to go to another engine

    def _read_head(self) -> None:
        """The head has come, or none will: then the error is raised."""
        delivery, response = self._delivery, self._response
        if response.status == 200 and is_event_stream(response.headers):
            self._stream = stream = delivery.form.stream(
                delivery.engine_id,
                withhold=delivery.body.withholds_usage,
                choices=delivery.choices,
                bounds=delivery.bounds,
            )
            self._gaps = self._upstream.gaps.of[delivery.call.model, delivery.engine_id]
            self._progress = self._upstream.router.engines[delivery.engine_id].progress
            self._pass_on(stream)
        elif response.status == 200 and response.is_small:
            answer = response.take()
            self._hold(len(answer))
            self._answer(with_whole_pairs(answer))
        elif response.status:
            self._body = body = Gathered(MAX_ANSWER_BYTES)
            self._gather(body)
        elif response.error is not None:
            raise response.error

    def has_room(self) -> None:
        """The client has read what was written."""
        self._booking.client_is_slow = False
        self.advance()

    def end(self, error: BaseException | None) -> None:
        """The answer has ended, perhaps with an error."""
        on_end = self._on_end
        self.close()
        if on_end is not None:
            on_end(error)

    def _written(self) -> None:
        """All of the answer is written: the exchange ends when the client has it."""
        self._booking.client_is_slow = True  # the engine has sent all, whatever the client still has to read
        self._is_written = True
        if self._sink.is_drained:
            self.end(None)

    def _fail(self, error: EngineError, last: bytes = b"") -> None:
        """The engine is at fault. A client that has been told something gets the `last` events, and an error event."""
        if self._stream is not None and self._delivery.response_started:
            with suppress(PlaitError):  # of a sink that takes no more
                self._sink.end(last + self._delivery.form.error_event(error))
        self.end(error)

    # An answer that is not streamed.

    def _gather(self, body: Gathered) -> None:
        """Take what has come."""
        delivery, response = self._delivery, self._response
        if response.pieces:
            piece = response.take()
            self._hold(len(piece))
            body.add(piece)
        if response.error is not None:
            raise response.error
        if response.source is not None:
            return
        answer = with_whole_pairs(body.whole())
        if response.status == 200:
            self._answer(answer)
            return
        if self._held is not None:
            self._held.end()
        self._check_lack(response.status, bytes(answer))
        refused = _refused(delivery, response, bytes(answer), self._upstream.faults)
        self._is_written = True
        self._sink.whole(*refused)
        self._written()

    def _hold(self, size_bytes: int) -> None:
        """So many more bytes have come. They count in the delivery's `held`, too, until the answer is whole.

        Raises `AnswerTooLargeError` if all answers together have too many. The engine is not at fault.
        """
        delivery = self._delivery
        try:
            self._upstream.open_answers.hold(size_bytes)
        except AnswerTooLargeError:
            delivery.ended = "refused"
            raise
        delivery.held_bytes += size_bytes
        if delivery.held is not None:
            if self._held is None:
                self._held = OpenAnswer(delivery.held)
            self._held.hold(size_bytes)

    def _answer(self, answer: bytes | bytearray) -> None:
        """Check an answer, and write it."""
        delivery, text = self._delivery, self._delivery.text
        if self._held is not None:
            self._held.end()
        read = delivery.form.whole(delivery.engine_id, answer, delivery.bounds)
        if delivery.doubts:
            self._upstream.faults.convict(delivery, loop_time_s())
        delivery.ended = "ok"
        delivery.usage, delivery.usage_corrected, delivery.problem, delivery.finish = read
        if text is not None:
            text.whole(answer)
            delivery.problem = delivery.problem or text.problem
        self._is_written = True  # from here on, room for more only means that the client has it
        self._sink.whole(200, _start(delivery, self._response), answer)
        self._written()

    def _check_lack(self, status: int, answer: bytes) -> None:
        """Raises `LackError` if the engine refuses the call for what it lacks, and another engine may take it."""
        delivery, call, router = self._delivery, self._booking.call, self._upstream.router
        lack, unable = lack_of(status, answer, call.model), delivery.unable.union((delivery.engine_id,))
        if lack is None:
            return
        if lack is Lack.MODEL:
            router.health.lacks(delivery.engine_id, call.model)
        else:
            unable |= router.models.too_short(call, delivery.engine_id)
        if router.models.others(call.model, unable, delivery.route):
            delivery.unable, delivery.ended = unable, "refused"
            log.info("call moved", request_id=call.call_id, engine=delivery.engine_id, cause=lack)
            raise LackError(lack)

    # A stream.

    def _pass_on(self, stream: EventStream) -> None:
        """Pass whole events on, unless the client has to read first. Raises the error of an engine that has failed."""
        response, text, events = self._response, self._delivery.text, b""
        if response.pieces:
            if self._sink.is_full:
                return
            events = self._take(stream)
        has_ended = response.error is None and response.source is None
        if not self._begun:
            if has_ended and not events.strip():
                events = stream.end()
            if not self._begin(stream, events):
                return
        if text is not None and events:
            text.feed(events)
        if has_ended:
            self._end_stream(stream, events)
            return
        if events:
            self._sink.write(events)
            self._booking.client_is_slow = self._sink.is_full
        if response.error is not None:
            raise response.error

    def _take(self, stream: EventStream) -> bytes:
        """The whole events of the piece that has come."""
        if self._begun:
            assert self._gaps is not None
            assert self._progress is not None
            self._gaps.observe(self._progress.next_byte(self._booking, loop_time_s()))
        return stream.feed(self._response.take())

    def _begin(self, stream: EventStream, events: bytes) -> bool:
        """Begin the client's answer with the first whole events, if these are. Raises the engine's error among them."""
        response, now_s = self._response, loop_time_s()
        if isinstance(stream.error, EngineError):
            self._check_own(stream, stream.error, now_s)
        if isinstance(stream.error, str):  # older SGLangs refuse a stream in its first event
            self._check_lack(400, events)
        if not events.strip():
            if response.error is not None:
                raise response.error
            if response.source is None:
                raise EngineBrokenError(f"engine {self._delivery.engine_id} ended its stream without an event")
            return False
        if stream.error is None:
            if self._delivery.doubts:
                self._upstream.faults.convict(self._delivery, now_s)
            self._upstream.router.first_token(self._booking, now_s)
        self._sink.start(200, [*_start(self._delivery, response), UNBUFFERED])
        self._begun = True
        return True

    def _check_own(self, stream: EventStream, error: EngineError, now_s: float) -> None:
        """Raise the error that a stream has begun with, unless the request is at fault: then it is passed on."""
        if not isinstance(error, EngineStatusError):
            raise error
        if not self._upstream.faults.is_own(self._delivery, (error.status, error.said), now_s):
            raise error
        stream.error = error.said

    def _end_stream(self, stream: EventStream, events: bytes) -> None:
        """The engine has ended its stream, with these events. If they end badly, the client is told."""
        delivery, text, rest, problem = self._delivery, self._delivery.text, stream.end(), stream.problem
        if isinstance(problem, EngineError) and stream.error is None:
            self._fail(problem, events)
            return
        self._sink.end(events + rest if problem is None else events)
        if isinstance(problem, EngineError):  # the engine's own error event has been passed on
            self.end(problem)
            return
        delivery.ended = "ok" if stream.error is None else "refused"
        delivery.problem = problem if problem is not None or text is None else text.problem
        self._written()


def _refused(
    delivery: Delivery, response: Response, answer: bytes, faults: RequestFaults
) -> tuple[int, Headers, bytes]:
    """The answer to an error that is the caller's fault. Raises `EngineStatusError` for every other."""
    link, status, (is_openai, said, param) = delivery.link, response.status, error_text(answer)
    assert link is not None
    ours = link.refused_ours(status)
    is_own = status == NOT_SUPPORTED or faults.is_own(delivery, (status, said), loop_time_s())
    if not (is_own or (400 <= status < 500 and status not in TOO_EARLY)) or ours:
        shown = 502 if ours or not 429 <= status < 600 else status
        raise EngineStatusError(
            f"engine {delivery.engine_id} answered with status {status}{said and f': {said}'}",
            shown,
            retry_after_s=retry_after_s(response.headers),
            said=said,
        )
    delivery.ended, delivery.engine_status = "refused", status
    headers = _start(delivery, response)
    if not is_openai:
        error = CallerError(said or f"The engine refused the request with status {status}.", param=param)
        answer = delivery.form.error_body(error)
        headers = [item for item in headers if item[0] not in (b"content-type", b"content-encoding")]
        headers.append((b"content-type", b"application/json"))
    if is_own:
        headers.append(NO_RETRY)
    delivery.problem = f"refused with status {status}{said and f': {said}'}"
    return status, headers, answer


def _start(delivery: Delivery, response: Response) -> list[tuple[bytes, bytes]]:
    """The headers of the answer, which the client gets now: from here on the call stays with this attempt."""
    booking, link = delivery.booking, delivery.link
    assert booking is not None
    assert link is not None
    delivery.response_started = True
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
    outlook = _outlook(delivery, booking) if booking.call.slo is not None and response.status == 200 else None
    if outlook is not None:
        headers.append((b"plait-slo", outlook))
    return headers


def _outlook(delivery: Delivery, booking: Booking) -> bytes | None:
    """What is known of a call's TTFT and JCT at its first token, or when all of its answer is there at once.

    None if neither was looked at when it was placed, and neither is missed.
    """
    slo, placement, first_s = booking.call.slo or NO_SLO, booking.placement, booking.first_token_s
    age_s = (loop_time_s() if first_s is None else first_s) - delivery.arrived_s
    if slo.is_missed(age_s):
        return b"missed"
    if placement.meets_slo is None:
        return None
    rest_s = 0.0 if first_s is None else placement.decode_s
    is_late = slo.jct_s is not None and age_s + rest_s > slo.jct_s
    return b"at-risk" if is_late or not placement.meets_slo else b"expected"


def passed(headers: Headers, names: AbstractSet[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers with these names, but for those of the last hop alone (RFC 9110, 7.6.1)."""
    given = list(map(NAME, headers))
    found = list(compress(headers, map(names.__contains__, given)))
    if b"connection" not in given or (dict(headers)[b"connection"] in _USUAL and given.count(b"connection") == 1):
        return found
    of_hop = {one.strip().lower() for name, value in headers if name == b"connection" for one in value.split(b",")}
    return [item for item in found if item[0] not in of_hop]
