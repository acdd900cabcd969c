"""The relay: sends a call to the engine it was placed on and streams the answer back as it comes.

The answer's bytes are not changed; the usage is read from them. `Relay._close` settles or releases each call exactly
once, however it ends: answered, refused by its engine, engine lost, client gone or gateway stopping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from starlette.types import Receive, Send

from plait.backends.errors import EngineError, EngineUnreachableError, NoEngineError
from plait.backends.http.client import HttpClient, Response
from plait.gateway.asgi import Headers, send_whole, unless_gone
from plait.gateway.calls.completion_text import TextTap, refusal
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.outgoing import OutgoingBody
from plait.gateway.calls.sse import UsageTap, body_usage
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call

# Request headers that are not passed on: Plait sets them, they belong to one hop, or they are not for the engine.
_NOT_FORWARDED = frozenset(
    (
        b"host", b"content-length", b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"accept-encoding", b"authorization", b"x-request-id",
    )
)  # fmt: skip
# Response headers that are not passed on: Plait or its server sets them, or they belong to one hop.
_NOT_RETURNED = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id")
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLink:
    """The way to reach an engine: its connections and its API key."""

    client: HttpClient
    authorization: bytes | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A request to be placed and sent. The call's times count from `arrived_s`: its arrival, or when it was ready.

    `session` is echoed in a header. `text` reads the completion's text, if it is needed. The engine `continues_on` has
    most of the prompt in its cache. The call failed on the engines in `avoids`; it goes there only if there is no other
    engine.
    """

    call: Call
    path: str
    headers: Headers
    body: OutgoingBody
    arrived_s: float
    session: str | None = None
    text: TextTap | None = None
    continues_on: str | None = None
    avoids: frozenset[str] = frozenset()


Problem = EngineError | str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a delivered call ended.

    `problem` is None if the engine answered in full, with a text if the call needs one. It is an `EngineError` if the
    engine is at fault, so that another engine may succeed. `is_told` is False if nothing was sent to the client.
    """

    engine_id: str
    problem: Problem = None
    is_told: bool = True


@dataclass(slots=True)
class _Attempt:
    """One call on one engine, and how it ended. `delivered` is True once the engine has accepted the call."""

    booking: Booking
    outcome: str = "client_gone"
    usage: CallUsage | None = None
    delivered: bool = False

    def engine_error(self, problem: str) -> EngineError:
        """The error for a problem that the engine reported."""
        return EngineError(f"engine {self.booking.placement.engine_id}: {problem}")


class Relay:
    """Delivers calls over `links`, by engine id. With `forward_client_key`, engines get the client's bearer token."""

    def __init__(
        self, router: Router, links: Mapping[str, EngineLink], metrics: CallMetrics, *, forward_client_key: bool
    ) -> None:
        self._router = router
        self._links = links
        self._metrics = metrics
        self._forward_client_key = forward_client_key

    async def deliver(self, delivery: Delivery, receive: Receive, send: Send) -> None:
        """Place the call, send it, stream the answer back. Raises `PlaitError` only before the first byte."""
        outcome = await unless_gone(receive, self.run(delivery, send))
        if isinstance(outcome.problem, EngineError) and not outcome.is_told:
            raise outcome.problem

    async def run(self, delivery: Delivery, send: Send) -> Outcome:
        """Like `deliver`, but the call goes on if the client leaves.

        Tries engines until one can be reached; the others are set aside. Raises `PlaitError` if no engine is left.
        """
        for _ in range(len(self._links)):
            placement = self._router.select(delivery.call, prefer=delivery.continues_on, avoid=delivery.avoids)
            booking = self._router.book(delivery.call, placement, loop_time_s())
            self._metrics.placed(booking)
            attempt, engine_id = _Attempt(booking), booking.placement.engine_id
            try:
                return Outcome(engine_id, await self._attempt(attempt, delivery, send))
            except EngineUnreachableError as error:
                attempt.outcome = "unreachable"
                self._router.engine_unreachable(engine_id)
                log.warning("engine unreachable", engine=engine_id, error=error.message)
            except EngineError as error:
                attempt.outcome = "engine_error"
                return Outcome(engine_id, error, is_told=False)
            finally:
                self._close(attempt, delivery)
        message = f"No engine that serves model '{delivery.call.model}' can be reached; try again shortly."
        raise NoEngineError(message, retry_after_s=1.0)

    async def _attempt(self, attempt: _Attempt, delivery: Delivery, send: Send) -> Problem:
        """Send one engine's answer to the client; returns its problem, or None for a complete answer."""
        placement = attempt.booking.placement
        link, kind = self._links[placement.engine_id], self._router.engines[placement.engine_id].kind
        body = delivery.body.for_engine(kind, delivery.call, placement, loop_time_s() - delivery.arrived_s)
        response = await link.client.post(delivery.path, self._request_headers(delivery, link), body)
        try:
            attempt.delivered = response.status < 400
            headers = _response_headers(response, attempt.booking, delivery.session)
            if response.status == 200 and _is_event_stream(response):
                first = await response.read_chunk()
                self._router.first_token(attempt.booking, loop_time_s())
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                return await self._stream(attempt, delivery, first, response, send)
            answer = await response.read()
            attempt.outcome = "ok" if attempt.delivered else "refused"
            attempt.usage = body_usage(answer) if attempt.delivered else None
            if delivery.text is not None and attempt.delivered:
                delivery.text.whole(answer)
            await send_whole(send, response.status, headers, answer)
            if attempt.delivered:
                return _text_problem(attempt, delivery)
            refused = f"refused with status {response.status}: {refusal(answer)}"
            return attempt.engine_error(refused) if response.status >= 500 else refused
        finally:
            response.abort()

    async def _stream(
        self, attempt: _Attempt, delivery: Delivery, piece: bytes, response: Response, send: Send
    ) -> Problem:
        """Pass on whole events. If the connection to the engine breaks, an error event ends the stream."""
        tap, text = UsageTap(withhold=delivery.body.withholds_usage), delivery.text
        try:
            while piece:
                events = tap.feed(piece)
                if events:
                    if text is not None:
                        text.feed(events)
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                piece = await response.read_chunk()
        except EngineError as error:
            attempt.outcome = "engine_error"
            log.warning("stream broke", engine=attempt.booking.placement.engine_id, error=error.message)
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % error.body()})
            return error
        finally:
            attempt.usage = tap.usage
        attempt.outcome = "ok"
        await send({"type": "http.response.body", "body": tap.end()})
        return _text_problem(attempt, delivery)

    def _close(self, attempt: _Attempt, delivery: Delivery) -> None:
        """Settle or release the booking, then count and log the call."""
        booking, usage, now_s = attempt.booking, attempt.usage, loop_time_s()
        if usage is not None and attempt.outcome == "ok":
            self._router.settle(booking, usage, now_s)
        else:
            self._router.release(booking, now_s, delivered=attempt.delivered)
        self._metrics.ended(booking, attempt.outcome, usage, delivery.arrived_s, now_s)
        log.info(
            "call",
            request_id=booking.call.call_id,
            model=booking.call.model,
            engine=booking.placement.engine_id,
            placement=booking.placement.reason.value,
            outcome=attempt.outcome,
            prompt_tokens=booking.call.prompt_tokens,
            predicted_cached_tokens=booking.placement.cached_tokens,
            cached_tokens=usage and usage.cached_tokens,
            output_tokens=usage and usage.output_tokens,
            ttft_s=booking.first_token_s and round(booking.first_token_s - delivery.arrived_s, 4),
            e2e_s=round(now_s - delivery.arrived_s, 4),
        )

    def _request_headers(self, delivery: Delivery, link: EngineLink) -> list[tuple[bytes, bytes]]:
        headers = [
            (name, value)
            for name, value in delivery.headers
            if name not in _NOT_FORWARDED and not name.startswith(b"plait-")
        ]
        headers.append((b"x-request-id", delivery.call.call_id.encode("latin-1")))
        if link.authorization is not None:
            headers.append((b"authorization", link.authorization))
        elif self._forward_client_key:
            headers += [item for item in delivery.headers if item[0] == b"authorization"]
        return headers


def _text_problem(attempt: _Attempt, delivery: Delivery) -> Problem:
    """The reason why a complete answer has no text; None if it has one or the call needs none."""
    text = delivery.text
    if text is None or text.problem is None:
        return None
    return attempt.engine_error(text.problem) if text.engine_failed else text.problem


def _response_headers(response: Response, booking: Booking, session: str | None) -> list[tuple[bytes, bytes]]:
    placement = booking.placement
    echoed = [] if session is None else [(b"plait-session", session.encode("latin-1"))]
    return [
        *(item for item in response.headers if item[0] not in _NOT_RETURNED),
        (b"x-request-id", booking.call.call_id.encode("latin-1")),
        (b"plait-engine", placement.engine_id.encode("latin-1")),
        (b"plait-placement", placement.reason.value.encode()),
        (b"plait-cached-tokens", str(placement.cached_tokens).encode()),
        *echoed,
    ]


def _is_event_stream(response: Response) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in response.headers)
