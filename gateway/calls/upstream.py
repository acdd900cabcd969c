"""The engine's side of a call: sends the request, checks the answer, and forwards the answer as it arrives.

An `Exchange` is one attempt's answer on its way. Two events drive it, and both end in `Exchange.advance`: the response
has changed (head, bytes, end, error), or the client has read what was written. Backpressure: while the client's sink is
full, the exchange takes nothing from the response, whose connection then stops reading. An unstreamed answer is
buffered until it is whole. The client gets no byte before a whole event or answer has passed the checks, so that until
then another engine can take the call.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from plait.backends.errors import (
    ENDS_STREAMS,
    EngineBrokenError,
    EngineError,
    EngineGarbledError,
    EngineLostError,
    EngineStatusError,
    NoEngineError,
    PlaitError,
)
from plait.backends.http.client import Response
from plait.backends.http.connection import Gathered
from plait.backends.http.content_types import is_no_json, should_be_json
from plait.backends.protocol.surrogates import with_whole_pairs
from plait.gateway.answers.completions import EventStream, garbled
from plait.gateway.answers.error_texts import error_of, error_text
from plait.gateway.answers.event_bytes import end_of_event
from plait.gateway.answers.refusals import Lack, LackError, lack_of, refused_field
from plait.gateway.asgi import EVENT_STREAM, NO_RETRY, UNBUFFERED, Headers, Sink, header, presented_keys
from plait.gateway.calls.answer_headers import answer_headers, passed
from plait.gateway.calls.call import Attempt, known_finish
from plait.gateway.calls.delivery import Delivery, DeliveryState
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswer, OpenAnswers
from plait.gateway.calls.outgoing import Recipient, without_refused
from plait.gateway.calls.request_faults import NOT_SUPPORTED, RequestFaults, status_said
from plait.gateway.fleet.booking import Progress
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import TOO_EARLY, EngineLink, retry_after_s
from plait.gateway.metrics import Buckets
from plait.gateway.timer import loop_time_s

MAX_ANSWER_BYTES = 256 * 2**20
"""The longest answer that is not streamed. It is buffered until the client has read it."""

log = structlog.get_logger(__name__)

OF_THE_BODY: Final = frozenset((b"content-type", b"content-encoding", b"cache-control"))
JSON_ANSWER: Final[Headers] = ((b"content-type", b"application/json"),)


class Upstream:
    """Sends calls over `links` (by engine id).

    `metrics` observes the gaps between the pieces of streams, and the reuse of prompts. `faults` decides whether the
    engine or the request is at fault for a failure. With `forward_client_key`, engines without a configured key get the
    client's bearer token.
    """

    def __init__(
        self,
        router: Router,
        links: Mapping[str, EngineLink],
        metrics: CallMetrics,
        open_answers: OpenAnswers,
        faults: RequestFaults,
        *,
        forward_client_key: bool,
        max_attempts: int,
    ) -> None:
        self.faults = faults
        self.open_answers = open_answers
        self.gaps = metrics.gaps
        self.router = router
        self._reuse = metrics.reuse
        self._links = links
        self.forward_client_key = forward_client_key
        self.max_attempts = max_attempts

    def send(self, delivery: Delivery, attempt: Attempt, on_news: Callable[[], None]) -> Exchange:
        """Send the call to the engine that it is booked on.

        `on_news` is called when the response has changed or the client has room. The caller then calls
        `Exchange.advance`.
        """
        booking, asked = attempt.booking, delivery.asked
        call, placement = booking.call, booking.placement
        link = self._links[placement.engine_id]
        if call.block_hashes and not delivery.tried:  # the histogram of reuse counts a prompt once, not its retries
            self._reuse.used(call)
        engine, age_s = self.router.engines[placement.engine_id], booking.sent_s - call.arrived_s
        cache, lacks = engine.cache, engine.refused_fields
        body = asked.body.for_engine(Recipient(cache.kind, call, placement, age_s, asked.slot.handle, cache.agreement))
        if (lacks or delivery.refused) and isinstance(body, bytes):
            lacks = {**lacks, **delivery.refused.get(placement.engine_id, {})}
            body = without_refused(body, asked.body.own_fields, lacks)
        headers = passed(asked.headers, link.passed.to_engines)
        headers.append((b"x-request-id", call.call_id.encode("latin-1")))
        headers.extend(link.rank)
        if link.authorization is not None:
            headers.append((b"authorization", link.authorization))
        elif self.forward_client_key and (keys := presented_keys(asked.headers)):
            headers.append((b"authorization", b"Bearer " + keys[0]))
        for companion in delivery.companions:
            given, body = companion.sent(headers, body, delivery)
            headers = [*given]
        response = link.client.begin("POST", asked.path, headers, body)
        exchange = Exchange(self, delivery, attempt, link, response, delivery.sink, on_news)
        response.on_news, delivery.sink.on_room, booking.give_up = on_news, exchange.has_room, exchange.give_up
        return exchange


class Exchange(msgspec.Struct, eq=False):
    """An engine's response to one attempt, on its way to the client's sink. Fills the attempt's `Answer`."""

    _upstream: Upstream
    _delivery: Delivery
    _attempt: Attempt
    _link: EngineLink
    _response: Response
    _sink: Sink
    _on_news: Callable[[], None]
    _stream: EventStream | None = None  # set for a streamed answer
    _gaps: Buckets | None = None  # a histogram of the times between pieces of streams
    _progress: Progress | None = None  # of the engine
    _body: Gathered | None = None  # set for an unstreamed answer
    _held: OpenAnswer | None = None  # counts the buffered bytes of `_body`
    _is_unasked_stream: bool = False  # the body is a stream for a call that asked for none

    def give_up(self, error: EngineError) -> None:
        """Fail the attempt with `error`. A call without a byte is taken off its engine once, if another may take it."""
        stays = isinstance(error, EngineLostError) and not self._may_move()
        if self._response.source is not None and not stays:
            self._response.source.fail(error)

    def _may_move(self) -> bool:
        delivery, asked, router = self._delivery, self._delivery.asked, self._upstream.router
        if self._upstream.max_attempts < 2 or delivery.failures:
            return False
        others = router.engines.keys() - {self._attempt.engine_id} - asked.avoids - delivery.unable
        with suppress(NoEngineError):
            return any(router.models.takes(delivery.call, name, asked.route) for name in others)
        return False

    @property
    def has_last_event(self) -> bool:
        """Whether the client has the last event of a stream. The engine may not have closed its side yet."""
        stream = self._stream
        return stream is not None and (stream.problem is None or stream.error is not None)

    def redirect(self, sink: Sink) -> None:
        """Send the answer to this sink instead. Only before its first byte."""
        self._sink = sink
        sink.on_room = self.has_room

    def close(self) -> None:
        """Detach from the response and the sink. Aborts the request if the engine's answer has not ended."""
        response = self._response
        response.on_news = self._sink.on_room = self._attempt.booking.give_up = None
        if response.source is not None:  # the response has not ended
            response.abort()
        self.keep()
        if self._held is not None:
            self._held.end()

    def keep(self) -> None:
        """Copy the usage and the finish reason of a stream so far into the `Answer`."""
        stream, answer = self._stream, self._attempt.answer
        if stream is not None:
            answer.usage, answer.is_corrected = stream.usage, stream.usage_corrected
            answer.finish = known_finish(stream.finish)
            if stream.problem is None:  # the answer is whole even if the engine never closes the connection
                answer.outcome = "ok"

    # Events.

    def advance(self) -> bool:
        """Forward what has arrived, as far as the client has room. Returns whether the client has the whole answer.

        Raises `EngineError` if the engine is at fault, `LackError` if it lacks what another engine may have.
        """
        try:
            if self._delivery.state is DeliveryState.WRITTEN:
                pass
            elif self._stream is not None:
                self._pass_on(self._stream)
            elif self._body is not None:
                self._gather(self._body)
            else:
                self._read_head()
            if self._delivery.one_by_one and self._stream is not None:
                while self._response.pieces and self._delivery.state is not DeliveryState.WRITTEN:
                    if self._sink.is_full:
                        break
                    self._pass_on(self._stream)
        except EngineError as error:
            encoding = header(self._response.headers, b"content-encoding")
            if encoding is not None and isinstance(error, EngineGarbledError | EngineBrokenError):
                error.message = f"engine {self._attempt.engine_id} sent an unasked encoding, {encoding!r}"
            self._tell(error)
            raise
        except ENDS_STREAMS as error:
            self._tell(error)
            raise
        return self._delivery.state is DeliveryState.WRITTEN and self._sink.is_drained

    def _read_head(self) -> None:
        """Choose by status and headers how the body is read. Raises the response's error if it failed before them."""
        delivery, response, asked = self._delivery, self._response, self._delivery.asked
        is_stream = response.status == 200 and asked.form.streams(response.headers)
        self._is_unasked_stream = is_stream and asked.form.has_events and not delivery.call.streamed
        if is_stream and not self._is_unasked_stream:
            engine_id = self._attempt.engine_id
            self._stream = stream = asked.form.stream(
                engine_id, withhold=asked.body.withholds_usage, choices=asked.choices, bounds=asked.bounds
            )
            self._gaps = self._upstream.gaps.of[delivery.call.model, engine_id]
            self._progress = self._upstream.router.engines[engine_id].progress
            self._pass_on(stream)
        elif response.status == 200 and response.is_small:
            answer = response.take()
            self._hold(len(answer))
            self._answer(_mended(answer, response))
        elif response.status:
            self._body = body = Gathered(MAX_ANSWER_BYTES)
            self._gather(body)
        elif response.error is not None:
            raise response.error

    def has_room(self) -> None:
        """The client has read what was written."""
        self._attempt.booking.client_is_slow = False
        self._on_news()

    def _write(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        """Write a whole answer. The sink's `on_room` then means that the client has read it.

        Raises the `EngineError` of an answer that cannot be translated: another engine may get the call.
        """
        self._sink.whole(status, headers, body)
        self._delivery.enter(DeliveryState.WRITTEN)
        self._has_ended()

    def _has_ended(self) -> None:
        """The engine has sent everything, so silence from now on is not its fault."""
        self._attempt.booking.client_is_slow = True

    def _tell(self, error: PlaitError, last: bytes = b"") -> None:
        """End a stream that has begun with its `last` events and an error event."""
        if self._delivery.untold(error) is None and self._delivery.state is DeliveryState.STREAMING:
            self._delivery.enter(DeliveryState.WRITTEN)
            with suppress(PlaitError):  # the sink may take no more; the engine's error counts
                self._sink.end(last + self._delivery.asked.form.errors.event(error))

    # An answer that is not streamed.

    def _gather(self, body: Gathered) -> None:
        response = self._response
        if response.pieces:
            piece = response.take()
            self._hold(len(piece))
            body.add(piece)
        if response.error is not None:
            raise response.error
        if response.source is not None:
            return
        answer = _mended(body.whole(), response)
        if response.status == 200:
            self._answer(answer)
            return
        self._is_whole()
        self._refuse(response.status, bytes(answer))

    def _hold(self, size_bytes: int) -> None:
        """Count buffered bytes. Raises `PlaitError` beyond a limit, for which the engine is not at fault."""
        if self._held is None:
            total, own = self._upstream.open_answers, self._delivery.asked.slot.answer_bytes
            self._held = OpenAnswer(total) if own is None else OpenAnswer(total, own)
        self._held.hold(size_bytes)

    def _is_whole(self) -> None:
        """The body is whole. The bytes now count against the gateway's limit only, not against `Slot.answer_bytes`."""
        own = self._delivery.asked.slot.answer_bytes
        if self._held is not None and own is not None:
            self._held.end_in(own)

    def _answer(self, body: bytes | bytearray) -> None:
        delivery, attempt, asked = self._delivery, self._attempt, self._delivery.asked
        answer, engine_id = attempt.answer, attempt.engine_id
        self._is_whole()
        if self._is_unasked_stream:
            body = asked.form.assembled(engine_id, bytes(body))
        read = asked.form.whole(engine_id, body, asked.bounds)
        answer.usage, answer.is_corrected, failed_status, finish, mended, is_not_json = read
        if is_not_json and should_be_json(self._response.headers):
            raise garbled(engine_id, "an answer that is not JSON")
        if failed_status is not None:
            self._refuse(failed_status, bytes(body))
            return
        body = body if mended is None else mended
        events = None
        if delivery.call.streamed:
            events = asked.form.as_events(engine_id, body, withhold=asked.body.withholds_usage)
        if self._upstream.faults.doubts:
            self._upstream.faults.convict(delivery, loop_time_s())
        answer.outcome = "ok"
        answer.finish = known_finish(finish)
        if asked.slot.text is not None:
            asked.slot.text.whole(body)
            answer.problem = asked.slot.text.problem
        head = self._head()
        if events is not None or self._is_unasked_stream:
            kind = JSON_ANSWER if events is None else EVENT_STREAM
            head = [*(item for item in head if item[0] not in OF_THE_BODY), *kind]
        if events is None:
            self._write(200, head, body)
        else:
            delivery.enter(DeliveryState.WRITTEN)
            self._sink.start(200, head)
            self._sink.end(events)
            self._has_ended()

    def _refuse(self, status: int, body: bytes) -> None:
        """Forward an error that is the caller's fault. Raises `EngineStatusError` for one that is the engine's.

        Raises `LackError` as `_check_lack` does.
        """
        self._check_lack(status, body)
        delivery, attempt, response = self._delivery, self._attempt, self._response
        is_openai, said, _ = error_text(body)
        ours = self._link.refused_ours(status, clients=self._upstream.forward_client_key)
        is_own = status == NOT_SUPPORTED or self._is_own(status, said, loop_time_s())
        if not (is_own or (400 <= status < 500 and status not in TOO_EARLY)) or ours:
            shown = 502 if ours or not 429 <= status < 600 else status
            said = "it wants another API key than the gateway has for it" if ours else said  # may quote the key
            failure = EngineStatusError(
                f"engine {attempt.engine_id} answered with status {status}{said and f': {said}'}",
                shown,
                retry_after_s=retry_after_s(response.headers),
                said=said,
            )
            if ours:
                failure.cause = f"status_{status}"
            raise failure
        headers, errors = self._head(), delivery.asked.form.errors
        if not (is_openai and errors.are_openais):
            body = errors.body(error_of(status, body))
            headers = [*(item for item in headers if item[0] not in OF_THE_BODY), *JSON_ANSWER]
        if is_own:
            headers.append(NO_RETRY)
        answer = attempt.answer
        answer.outcome, answer.status = "refused", status
        answer.problem = f"refused with status {status}{said and f': {said}'}"
        self._write(status, headers, body)

    def _is_own(self, status: int, said: str, now_s: float) -> bool:
        """Whether an engine's error is the request's own fault."""
        text = status_said(status, said)
        return self._upstream.faults.is_own(self._delivery, self._attempt.engine_id, text, now_s)

    def _check_lack(self, status: int, body: bytes) -> None:
        """Raises `LackError` if the engine lacks what another engine has, or a field that the gateway can leave out."""
        attempt, router, asked = self._attempt, self._upstream.router, self._delivery.asked
        call, engine_id = attempt.booking.call, attempt.engine_id
        lack, unable = lack_of(status, body, call.model), self._delivery.unable.union((engine_id,))
        if lack is None:
            found, known = refused_field(status, body, asked.body.own_fields), self._delivery.refused
            if found is None or found[0] in known.get(engine_id, ()):
                return
            known.setdefault(engine_id, {}).update((found,))
            lack, unable = Lack.FIELD, self._delivery.unable
        elif lack is Lack.MODEL:
            router.health.lacks(engine_id, call.model)
        else:
            unable |= router.models.too_short(call, engine_id)
        if lack is Lack.FIELD or router.models.others(call.model, unable, asked.route):
            attempt.answer.outcome = "refused"
            log.info("call moved", request_id=call.call_id, engine=engine_id, cause=lack)
            raise LackError(lack, unable)

    def _head(self) -> list[tuple[bytes, bytes]]:
        booking = self._attempt.booking
        booking.client_is_slow = True  # until `has_room` says that the client has read the beginning
        return answer_headers(self._delivery, booking, self._response, self._link.passed.to_clients)

    # A stream.

    def _pass_on(self, stream: EventStream) -> None:
        """Forward whole events, unless the sink is full. Raises the error of an engine that has failed."""
        response, text, events = self._response, self._delivery.asked.slot.text, b""
        if response.pieces:
            if self._sink.is_full:
                return
            events = self._take(stream)
        has_ended = response.error is None and response.source is None and not response.pieces
        if self._delivery.state is not DeliveryState.STREAMING:
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
            self._attempt.booking.client_is_slow = self._sink.is_full
        if response.error is not None and not response.pieces:
            raise response.error

    def _take(self, stream: EventStream) -> bytes:
        if self._delivery.state is DeliveryState.STREAMING:
            assert self._gaps is not None
            assert self._progress is not None
            self._gaps.observe(self._progress.next_byte(self._attempt.booking, loop_time_s()))
        arrived = self._response.take()
        if self._delivery.one_by_one:
            end = end_of_event(arrived)
            self._response.put_back(arrived[end:])
            arrived = arrived[:end]
        events = stream.feed(arrived)
        if stream.error is None:
            self._attempt.answer.passed_tokens += events.count(self._delivery.asked.form.token_mark)
        return events

    def _begin(self, stream: EventStream, events: bytes) -> bool:
        """Send the head once `events` has a whole event; returns whether it did. Raises an error that comes first.

        The caller writes the events.
        """
        response, now_s = self._response, loop_time_s()
        if isinstance(stream.error, EngineError):
            self._check_own(stream, stream.error, now_s)
        if isinstance(stream.error, str):  # older SGLangs refuse a stream in its first event
            self._check_lack(400, events)
        if not events.strip():
            if response.error is not None and not response.pieces:
                raise response.error
            if response.source is not None or response.pieces:
                return False
            if not stream.may_be_empty:
                raise EngineBrokenError(f"engine {self._attempt.engine_id} ended its stream without an event")
        if stream.error is None:
            self._upstream.faults.convict(self._delivery, now_s)
            self._upstream.router.first_token(self._attempt.booking, now_s)
        head = [*self._head(), UNBUFFERED]
        self._delivery.enter(DeliveryState.STREAMING)
        self._sink.start(200, head)
        return True

    def _check_own(self, stream: EventStream, error: EngineError, now_s: float) -> None:
        """Raise the error that is a stream's first event, unless the request is at fault: then the client gets it."""
        if not isinstance(error, EngineStatusError) or not self._is_own(error.status, error.said, now_s):
            raise error
        stream.error = error.said

    def _end_stream(self, stream: EventStream, events: bytes) -> None:
        """The engine has ended its stream with these events. If the answer is not whole, an error event follows."""
        text, answer = self._delivery.asked.slot.text, self._attempt.answer
        rest, problem = stream.end(), stream.problem
        if isinstance(problem, EngineError) and stream.error is None:
            self._tell(problem, events)
            raise problem
        self._delivery.enter(DeliveryState.WRITTEN)
        self._sink.end(events + rest if problem is None else events)
        if isinstance(problem, EngineError):  # the engine's own error event has been passed on
            raise problem
        answer.outcome = "ok" if stream.error is None else "refused"
        answer.problem = problem if problem is not None or text is None else text.problem
        self._has_ended()


def _mended(body: bytes | bytearray, response: Response) -> bytes | bytearray:
    """The body with each lone surrogate replaced, without a mark of the byte order.

    A body that is no JSON stays: its bytes are no text.
    """
    mended = with_whole_pairs(body.removeprefix(BOM_UTF8) if body.startswith(BOM_UTF8) else body)
    return body if mended is not body and is_no_json(response.headers) else mended
