"""The call of a background response (`background: true`). It has a session of its own, with the response's id.

So a running response gets everything that sessions have: one gateway owns it, it is replayed from the log after a
crash, and it counts in its tenant's limits. When it ends, it becomes a stored response. The end of the session and the
response are in one commit, so that the response is neither lost nor generated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
import structlog

from plait.backends.errors import AnswerTooLargeError, EngineError, GatewayStoppingError, PlaitError
from plait.backends.protocol.openai import ChatRequest, parse_request
from plait.backends.translation.answer_translator import Identity
from plait.backends.translation.background_turn import PREFIX
from plait.backends.translation.translation import TRANSLATIONS
from plait.gateway.asgi import ClientGoneError
from plait.gateway.calls.annotations import read_annotations
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.outgoing import unhurried
from plait.gateway.calls.records import refused
from plait.gateway.calls.routes import CHAT_PATH
from plait.gateway.guests.programs.asked_step import AskedStep, RequestPrompt, without_keys
from plait.gateway.guests.programs.chained_call import CallRunner, ChainedCall
from plait.gateway.guests.programs.core.held_call import HeldCall, KeptRequest, ReadyCall
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.core.session_errors import FailureCause
from plait.gateway.guests.programs.filled_prompts import Request
from plait.gateway.guests.programs.unstored import unstored_events
from plait.gateway.guests.responses.background_answer import BackgroundAnswer
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.timer import loop_time_s
from plait.policy.types import Objective

T = TypeVar("T")

RESPONSES_PATH: Final = "/v1/responses"

log = structlog.get_logger(__name__)


class AskedResponse(msgspec.Struct, frozen=True):
    """A request for a background response. The log has it as JSON."""

    fields: dict[str, Any]
    """The request's fields; `input` has the whole conversation."""

    items: list[Any]
    """The request's own input."""

    previous: str | None
    """The id of the response that this response continues."""

    created_s: int
    """Unix time."""


def read_response(incoming: Incoming, asked: AskedResponse) -> AskedStep:
    """The step that generates a response: its request, translated to a chat.

    Raises `CallerError` for what no chat can express.
    """
    body = msgspec.json.encode(TRANSLATIONS[RESPONSES_PATH].to_chat({**asked.fields, "stream": True}))
    request = parse_request(body, ChatRequest)
    annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
    return AskedStep(
        msgspec.structs.replace(incoming, path=CHAT_PATH, body=body, is_translated=True),
        annotations.unless_marked(Objective.THROUGHPUT),  # nobody waits for it
        RequestPrompt(CHAT_PATH, body, request),
        fingerprint=None,
        kept=lambda: KeptRequest(
            "response", RESPONSES_PATH, without_keys(incoming.headers), msgspec.json.encode(asked)
        ),
    )


class BackgroundCall(ChainedCall):
    """The call of one response. Clients follow its `answer`, which is `stored` when it has ended."""

    __slots__ = ("_is_cancelled", "_is_kept", "_is_over", "_previous", "_stored", "answer", "fields", "items")

    def __init__(
        self,
        runner: CallRunner,
        session: Session,
        response: AskedResponse,
        asked: AskedStep,
        stored: StoredResponses,
    ) -> None:
        super().__init__(runner, session, asked)
        self._stored = stored
        self.fields = {name: value for name, value in response.fields.items() if name != "input"}
        self.fields["model"] = runner.reader.router.models.target(asked.prompts.model)  # as engines answer
        identity = Identity(session.session_id.removeprefix(PREFIX), response.created_s)
        self.sink = self.answer = BackgroundAnswer(self.fields, identity, self.answer_bytes)
        self.items = msgspec.json.encode(response.items)
        self.call.held_bytes += len(self.items)
        self._previous = response.previous
        self._is_cancelled = False
        self._is_over = self._is_kept = False

    async def run(self, ready: ReadyCall) -> None:
        """Deliver the chat, and store the response."""
        await super().run(ready)
        if self.answer.problem is not None:
            raise self.answer.problem
        with self._stored.together():
            self._has_ended = True
            self.runner.executor.finish(self.call, loop_time_s())
            self._keep()

    def adapt(self, request: Request) -> Request:
        return request if self.fields.get("stream") else unhurried(request)

    def cancel(self) -> None:
        with self._stored.together():
            self.runner.executor.cancel(self.call, loop_time_s())

    def give_up(self, problem: str) -> None:
        self._fail(FailureCause(message=problem), problem, EngineError(f"The response was given up: {problem}."))

    def take_back(self) -> bool:
        """Always True: readers go on at their sequence numbers."""
        self.answer.take_back()
        return True

    def on_broken(self, error: PlaitError) -> None:
        self._is_cancelled = self.session.ended is None
        super().on_broken(error)

    def on_failed(self, error: PlaitError) -> None:
        """Log the end of a call that the relay has never had. Readers get the error from `_fail`."""
        if not self._is_delivered:
            self._is_delivered = True
            call, tenant = self.call, self.session.tenant.name
            told = ClientGoneError() if self._is_cancelled else error
            ending = refused(call.call_id, RESPONSES_PATH, tenant, call.model, arrived_s=call.arrived_s, error=told)
            self.runner.relay.holdings.records.no_call(ending)

    def _fail(self, cause: FailureCause, problem: str, error: PlaitError | None) -> None:
        """End and store the response, unless another gateway continues it or its session has ended."""
        if self._has_ended:
            return
        error = error or self.answer.problem or EngineError(cause.message)
        if self._goes_on(error):
            super()._fail(cause, problem, error)
            self.answer.break_off(error)
            return
        with self._stored.together():
            super()._fail(cause, problem, error)
            if self._is_cancelled:
                self.answer.cancel()
            else:
                self.answer.fail(error)
            self._keep()

    def _goes_on(self, error: PlaitError) -> bool:
        """Whether `error` must not end the response: its session has ended already, or another gateway continues it."""
        is_handed_over = self.runner.handed_over.is_set() and self.session.record.stores
        return self.session.ended is not None or is_handed_over or isinstance(error, GatewayStoppingError)

    def _keep(self) -> None:
        """Store the response as it has ended; as failed, without its output, if it is too large."""
        self._is_over = True
        if not self._put():
            log.warning("background response too large to be stored", session=self.session.session_id)
            self.answer.take_back()
            self.answer.fail(AnswerTooLargeError("The response is larger than this gateway stores. Ask for less."))
            self._put()
        self.runner.executor.endings.end(self.session, "has its response", loop_time_s())
        self.answer.finish(lambda events: self.once_stored(events, unstored_events))

    def _put(self) -> bool:
        """Store the response as it is. False if it is too large."""
        tenant, response_id, answer = self.session.tenant.name, self.session.session_id, self.answer.response
        self._is_kept = self._stored.put(
            tenant, response_id, previous=self._previous, items=self.items, answer=answer, now_s=loop_time_s()
        )
        return self._is_kept

    async def once_stored(self, answer: T, unstored: Callable[[T], T]) -> T:
        """Wait for the commit. Returns `answer`, or `unstored(answer)` if the response cannot be stored.

        Raises `PlaitError` if no client may be answered, because another gateway may own the response.
        """
        tenant, response_id = self.session.tenant.name, self.session.session_id
        if not self._is_over:
            return await self.session.record.once_stored(answer, unstored)
        if not self._is_kept:
            return unstored(answer)
        return await self._stored.once_stored(tenant, response_id, answer, unstored, in_background=True)


def responding_again(stored: StoredResponses, runner: CallRunner, session: Session, incoming: Incoming) -> HeldCall:
    """The call of a background response from the log. Raises `CallerError` if the request is not valid any more."""
    response = _ASKED.decode(incoming.body)
    return BackgroundCall(runner, session, response, read_response(incoming, response), stored).call


def response_of(session: Session) -> BackgroundCall | None:
    return next((call.owner for call in session.calls.values() if isinstance(call.owner, BackgroundCall)), None)


_ASKED = msgspec.json.Decoder(AskedResponse)
