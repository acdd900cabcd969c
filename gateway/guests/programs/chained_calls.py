"""Calls of programs on OpenAI's routes: requests that name variables, or whose session has an objective.

The asyncio shell of `executor`. A request waits until its inputs have values; then its call runs, its client gets the
answer, and the answer's text becomes the value of the output. While a call waits, only its client's request has a task.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from hashlib import sha256
from typing import Any

import msgspec
from starlette.types import Send

from plait.backends.errors import CallerError, ConflictError, GatewayStoppingError, LimitError, PlaitError
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, check_request, parse_request
from plait.gateway.asgi import EVENT_STREAM, ClientGoneError, Headers
from plait.gateway.calls.annotations import Annotations, promised_output, read_annotations
from plait.gateway.calls.call import Asked, Ending
from plait.gateway.calls.call_reader import CallReader, Incoming
from plait.gateway.calls.records import refused
from plait.gateway.calls.relay import Relay
from plait.gateway.calls.routes import CHAT_PATH, KINDS
from plait.gateway.guests.programs.asked_step import AskedStep, RequestPrompt, without_keys
from plait.gateway.guests.programs.chained_call import BrokenCallError, CallRunner, ChainedCall, Generated
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import HeldCall, KeptRequest, Output
from plait.gateway.guests.programs.core.record import ValueSet
from plait.gateway.guests.programs.core.session import Session, repeated
from plait.gateway.guests.programs.core.session_errors import FailureCause
from plait.gateway.guests.programs.core.sessions import stranded
from plait.gateway.guests.programs.entrance import Entrance
from plait.gateway.guests.programs.filled_prompts import FilledPrompts, Request
from plait.gateway.guests.programs.metrics import ProgramMetrics
from plait.gateway.guests.programs.recorded_answer import STREAM_END, HeldEnd, RecordedAnswer
from plait.gateway.guests.programs.transforms import parse
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.timer import loop_time_s
from plait.policy.programs.request_graph_state import VariableState

EXPIRE_INTERVAL_S = 1.0


class AnsweredCall(ChainedCall):
    """A call whose clients get the engine's answer. With `keeps`, a client may repeat its request to get it later."""

    __slots__ = ("_end", "answer", "is_left", "problem", "streams")

    is_answered = True

    def __init__(
        self,
        runner: CallRunner,
        session: Session,
        asked: AskedStep | None,
        path: str = "",
        *,
        streams: bool,
        keeps: bool,
    ) -> None:
        super().__init__(runner, session, asked, path)
        self.sink = self.answer = RecordedAnswer(self.answer_bytes, keeps=keeps)
        self.streams = streams
        self.is_left = False
        """Whether a client disconnected before its answer ended."""
        self.problem: PlaitError | None = None
        """The error that ended the answer, perhaps as an event of its stream, and then set before clients have it."""
        self._end: HeldEnd | None = None
        if keeps and session.record.stores:
            self.sink = self._end = HeldEnd(self.answer, session.record, is_whole=not streams)

    async def generate(self, asked: Asked) -> Generated:
        """Generate the output. If values are stored, the end of the answer waits for its value, or its failure."""
        if self._end is None:
            return await super().generate(asked)
        try:
            generated = await super().generate(asked)
        except (BrokenCallError, PlaitError):
            await self._end.release()
            raise
        await self._end.release()
        return generated

    def adapt(self, request: Request) -> Request:
        return request

    def kept_answer(self) -> bytes | None:
        """The body of an unstreamed answer. A repeated stream is made from the value, as one event."""
        return None if self._end is None or self.streams else self._end.body

    def take_back(self) -> bool:
        if self._end is not None:
            self._end.clear()
        return self.answer.take_back()

    def on_failed(self, error: PlaitError) -> None:
        """Send the error to the clients. Logs the end of a call that the relay has never had."""
        if not self._is_delivered:
            self._is_delivered, self.problem = True, error
            self._record(error)
        self.answer.fail(error)

    def _begins_anew(self, was_refused: bool, ending: Ending) -> bool:
        begins_anew = super()._begins_anew(was_refused, ending)
        found = ending.error or ending.problem
        if not begins_anew and isinstance(found, PlaitError):
            self.problem = found
        return begins_anew

    def _record(self, error: PlaitError) -> None:
        relay, call = self.runner.relay, self.call
        told = GatewayStoppingError() if relay.is_stopping else ClientGoneError() if self.is_left else error
        tenant = self.session.tenant.name
        ending = refused(call.call_id, self.path, tenant, call.model, arrived_s=call.arrived_s, error=told)
        relay.holdings.records.no_call(ending)


class ChainedCalls:
    def __init__(
        self,
        executor: Executor,
        reader: CallReader,
        relay: Relay,
        metrics: ProgramMetrics,
        bodies: OpenBodies,
    ) -> None:
        self.executor = executor
        turns, prompts = bodies.turns, FilledPrompts(reader, executor, bodies)
        self.runner = CallRunner(executor, reader, relay, metrics, prompts, turns, Entrance(turns))
        self.keep_alive_s = executor.sessions.limits.keep_alive_s

    def give_up_stranded(self) -> None:
        """The gateway takes no more requests: answer the clients that wait for another request (`stranded`)."""
        for session in self.executor.sessions:
            calls, getters = stranded(session)
            for call in calls:
                if isinstance(call.owner, ChainedCall):
                    call.owner.on_failed(GatewayStoppingError())
            for getter in getters:
                getter.on_failed(GatewayStoppingError())

    async def close(self) -> None:
        """End every session and its running calls."""
        tasks = list(self.runner.tasks)
        self.executor.endings.end_all("has ended because the gateway has stopped", loop_time_s())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def take(
        self, incoming: Incoming, request: ChatRequest | CompletionRequest, annotations: Annotations
    ) -> tuple[AnsweredCall, bool] | None:
        """The call of a request, and whether the request repeats it; None if the request is no part of a program.

        Waits while a program enters the request's session. Raises `PlaitError` for a call that is refused.
        """
        await self.runner.entrance.whole(incoming.tenant, annotations.session)
        if not self._takes(incoming, annotations):
            return None
        check_request(request)  # else the engine refuses it only when the inputs have values
        if annotations.session is None:
            raise CallerError(
                "'plait-inputs', 'plait-output', 'plait-when' and 'plait-session-objective' need a session: send "
                "'plait-session' as well.",
                param="plait-session",
                code="invalid_annotation",
            )
        self.runner.reader.router.models.check(request.model)
        asked = _asked(incoming, request, annotations)
        session = self.executor.sessions.open(
            incoming.tenant, annotations.session, incoming.arrived_s, durable=annotations.durable is not False
        )
        self.executor.prefer(session, annotations.session_objective, incoming.arrived_s)
        return self._entered(session, asked, streams=bool(request.stream))

    def _takes(self, incoming: Incoming, annotations: Annotations) -> bool:
        """Whether a request is part of a program: it names variables, or its session has an objective.

        Any other request only names a session. If the session exists, the request keeps it alive.
        """
        if annotations.inputs or annotations.output or annotations.when or annotations.session_objective:
            return True
        if annotations.session is None:
            return False
        session = self.executor.sessions.label(incoming.tenant, annotations.session, incoming.arrived_s)
        return session is not None and session.objective is not None

    def _entered(self, session: Session, asked: AskedStep, *, streams: bool) -> tuple[AnsweredCall, bool]:
        """Add the call to its session, or find the call that it repeats.

        Returns the call, and whether the request repeats it.
        """
        owner = _new_owner(self.runner, session, asked, streams=streams)
        first = repeated(session, owner.call)
        if first is None:
            self.executor.add(session, owner.call, asked.incoming.arrived_s)
            return owner, False
        assert isinstance(first.owner, AnsweredCall), "fingerprints tell routes apart"
        if not first.owner.answer.window.keeps:
            message = "This call was sent before, and its answer was not kept; get the value of its output instead."
            raise ConflictError(message, code="double_producer", param="plait-output")
        first.add_client()
        return first.owner, True

    async def answer(self, owner: AnsweredCall, send: Send) -> None:
        """Send the call's answer to a client as it comes. Raises `PlaitError` only before the first byte."""
        headers = [(b"plait-session", owner.session.session_id.encode())]
        await owner.answer.follow(send, headers, self.keep_alive_s if owner.streams else None)

    def left(self, owner: AnsweredCall) -> None:
        """One client of the call no longer waits: it has the answer, or has disconnected, or the gateway stops."""
        if not (owner.answer.ended or owner.has_ended):
            owner.is_left = True
            self.executor.leave([owner.call], loop_time_s())

    def refused(self, incoming: Incoming, error: PlaitError) -> None:
        """A request was refused before it became a call: fail its output, unless something else produces it.

        So consumers of the output do not wait in vain. A refusal that a retry may overcome fails nothing.
        """
        if not isinstance(error, CallerError) or isinstance(error, LimitError | ConflictError):
            return
        promised = promised_output(incoming.headers, _body_annotations(incoming.body))
        if promised is None:
            return
        session_id, variable = promised
        cause = FailureCause(message=f"it was refused: {error.message.rstrip('.')}")
        with suppress(PlaitError):  # the client gets the first error
            session = self.executor.sessions.open(incoming.tenant, session_id, loop_time_s())
            if not session.closed and session.state_of(variable) is VariableState.EMPTY:
                call_id = session.unused_id(incoming.request_id)
                self.executor.variables.set_failed(session, variable, cause, loop_time_s(), call_id)

    async def expire(self) -> None:
        """A task that ends the sessions past their time to live."""
        while True:
            await asyncio.sleep(EXPIRE_INTERVAL_S)
            self.executor.endings.expire(loop_time_s())


def _body_annotations(body: bytes) -> dict[str, object] | None:
    if b'"plait"' not in body:
        return None
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body, type=_AnnotatedBody).plait
    return None


class _AnnotatedBody(msgspec.Struct, frozen=True):
    plait: dict[str, object] | None = None


def _new_owner(runner: CallRunner, session: Session, asked: AskedStep, *, streams: bool) -> AnsweredCall:
    keeps = asked.annotations.output is not None
    return AnsweredCall(runner, session, asked, streams=streams, keeps=keeps)


def answered_again(runner: CallRunner, session: Session, incoming: Incoming) -> HeldCall:
    """The call of a request from the log. Raises `CallerError` if the request is not valid any more."""
    request = parse_request(incoming.body, KINDS[incoming.path])
    asked = _asked(incoming, request, read_annotations(incoming.headers, request.plait))
    return _new_owner(runner, session, asked, streams=bool(request.stream)).call


def answered_before(
    runner: CallRunner, session: Session, call: HeldCall, request: KeptRequest, event: ValueSet
) -> AnsweredCall:
    """The owner of a call that an earlier process has answered: a repeated request gets the same answer.

    The log has no answer of a stream, nor of a call that ended without its client: these are made from the value.
    """
    asked = msgspec.json.decode(request.body, type=_Addressed)
    owner = AnsweredCall(runner, session, None, request.path, streams=bool(asked.stream), keeps=True)
    owner.call = call
    kind: Headers = EVENT_STREAM if asked.stream else [(b"content-type", b"application/json")]
    body = event.answer or _answer_again(asked, request.path, call.call_id, event)
    headers = [*kind, (b"plait-session", session.session_id.encode())]
    owner.answer.restore([
        {"type": "http.response.start", "status": 200, "headers": headers},
        {"type": "http.response.body", "body": body},
    ])  # fmt: skip
    return owner


class _Addressed(msgspec.Struct):
    model: str = ""
    stream: bool | None = None


def once_answered(request: KeptRequest) -> KeptRequest:
    """The part of a logged request that `answered_before` needs. Raises `msgspec.MsgspecError` if it is no request."""
    asked = msgspec.json.decode(request.body, type=_Addressed)
    return KeptRequest(request.kind, request.path, (), msgspec.json.encode(asked))


def _answer_again(asked: _Addressed, path: str, call_id: str, event: ValueSet) -> bytes:
    """An answer made from a logged value: a whole one, or a stream with the text as one event, and the end."""
    text = event.value if event.text is None else event.text
    kind, choice = "text_completion", dict[str, Any](text=text)
    if path == CHAT_PATH:
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        choice = {"delta" if asked.stream else "message": {"role": "assistant", "content": text}}
    choices = [{"index": 0, **choice, "finish_reason": "length" if event.was_cut else "stop"}]
    made = {"id": call_id, "object": kind, "created": 0, "model": asked.model, "choices": choices}
    answer = msgspec.json.encode(made)
    return b"data: %b\n\n%b" % (answer, STREAM_END) if asked.stream else answer


def _asked(incoming: Incoming, request: ChatRequest | CompletionRequest, annotations: Annotations) -> AskedStep:
    """The step of a request with annotations. Raises `CallerError` for an output that could have several texts."""
    wanted, body = annotations.output, incoming.body
    if wanted is None:
        prompt = RequestPrompt(incoming.path, body, request, annotations.inputs)
        return AskedStep(incoming, annotations, prompt, fingerprint=None, kept=None)
    if request.choices != 1 or not request.single_prompt:
        message = "A call with 'plait-output' must have one completion: send one prompt, and 'n' of 1 or no 'n'."
        raise CallerError(message, param="n")
    transform = None if wanted.transform is None else parse(wanted.transform)
    output = Output(wanted.name, transform, wanted.must_be_whole)
    return AskedStep(
        incoming,
        annotations,
        RequestPrompt(incoming.path, body, request, annotations.inputs, (output,)),
        fingerprint=_fingerprint(incoming, annotations),
        kept=lambda: KeptRequest("answered", incoming.path, without_keys(incoming.headers), body),
    )


def _fingerprint(incoming: Incoming, annotations: Annotations) -> bytes:
    """A digest that a repetition of the request shares. It covers path, annotations and body, but no other headers."""
    digest = sha256(repr((incoming.path, annotations)).encode())
    digest.update(incoming.body)
    return digest.digest()
