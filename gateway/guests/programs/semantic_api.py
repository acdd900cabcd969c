"""The HTTP routes for sessions, semantic variables and submitted prompts (Parrot, section 7)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from plait.backends.errors import CallerError, FailedDependencyError, NotFoundError
from plait.backends.protocol.client_bodies import mended
from plait.backends.protocol.openai import decode_body
from plait.gateway.api.auth import KeyRing, key_of
from plait.gateway.api.own_route import OwnRoute, json_answer
from plait.gateway.asgi import id_of
from plait.gateway.calls.annotations import TAKEN, Annotations, Given, of_route
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.guests.programs.asked_step import AskedStep
from plait.gateway.guests.programs.asked_submission import read_submission
from plait.gateway.guests.programs.awaited_variable import (
    Criteria,
    VariableResponse,
    described,
    described_failure,
    given_by,
    mark_of,
)
from plait.gateway.guests.programs.chained_call import ChainedCall
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.programs.core.held_call import HeldCall
from plait.gateway.guests.programs.core.session import Session, repeated
from plait.gateway.guests.programs.core.session_errors import FailureCause
from plait.gateway.guests.programs.native_step import DeclaredStep, NativeSteps, StepInputs, StepSeconds
from plait.gateway.guests.programs.submission import SessionId, SubmitBody, TimeToLive, VariableName
from plait.gateway.guests.programs.unstored import unstored_response
from plait.gateway.ids import SESSION_ID, VARIABLE_NAME
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.intake.turns import Pieces
from plait.gateway.timer import loop_time_s
from plait.policy.programs.request_graph import CLIENT
from plait.policy.types import Objective

LONGEST_ERROR = 2_000
"""The most characters of the error message with which a client fails a variable."""


class SessionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/sessions`."""

    session_id: SessionId | None = None
    ttl_s: TimeToLive | None = None
    objective: Objective | None = None


class VariableBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/variables`."""

    session_id: SessionId
    semantic_var_id: VariableName | None = None
    value: str | None = None
    error: Annotated[str, Meta(min_length=1, max_length=LONGEST_ERROR)] | None = None
    inputs: StepInputs | None = None
    seconds: StepSeconds | None = None

    def check(self) -> None:
        """Raise `CallerError` for fields that exclude each other."""
        if self.value is not None and self.error is not None:
            raise CallerError("A variable gets a 'value' or an 'error', not both.", param="error")
        if self.inputs is not None and (self.value is not None or self.error is not None):
            raise CallerError("'inputs' declare a variable that is computed later, without a value.", param="inputs")
        if self.seconds is not None and self.inputs is None:
            raise CallerError("'seconds' is the time that computing takes; it needs 'inputs'.", param="seconds")


class GetBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/get`."""

    session_id: SessionId
    semantic_var_id: VariableName
    criteria: Criteria | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    stream: bool = False


BodyT = TypeVar("BodyT", SessionBody, VariableBody, GetBody)
_SUBMIT = msgspec.json.Decoder(SubmitBody)
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (SessionBody, VariableBody, GetBody)
}


EXAMPLES: Final[Mapping[str, Mapping[str, object]]] = {
    "/v1/sessions": {"ttl_s": 600},
    "/v1/variables": {"session_id": "s", "semantic_var_id": "topic", "value": "rain"},
    "/v1/get": {"session_id": "s", "semantic_var_id": "summary", "criteria": "latency"},
    "/v1/submit": {
        "session_id": "s",
        "model": "demo",
        "messages": [
            {"role": "user", "content": "Sum up {{topic}}."},
            {"role": "assistant", "content": "{{summary}}"},
        ],
        "placeholders": [
            {"name": "topic", "semantic_var_id": "topic"},
            {"name": "summary", "in_out": True, "semantic_var_id": "summary"},
        ],
    },
}
"""By path: a body."""


def _taken(
    path: str,
    endpoint: Callable[[Request], Awaitable[object]],
    summary: str,
    body: type[msgspec.Struct],
    tells: Collection[str] = (),
) -> OwnRoute:
    """A POST of a body of JSON that takes annotations."""
    return OwnRoute(
        "POST", path, endpoint, summary, body=body, example=EXAMPLES[path], annotations=TAKEN[path], tells=tells
    )


class SemanticApi:
    """The routes for sessions, variables and submissions. The application's exception handlers answer their errors."""

    def __init__(self, chained: ChainedCalls, keys: KeyRing, bodies: OpenBodies, keep_alive_s: float) -> None:
        self._chained = chained
        self._executor = chained.executor
        self._entrance = chained.runner.entrance
        self._natives = NativeSteps(chained.executor)
        self._keys = keys
        self._bodies = bodies
        self._keep_alive_s = keep_alive_s
        self.routes = [
            _taken("/v1/sessions", self._open, "Open a session", SessionBody),
            OwnRoute(
                "GET", "/v1/sessions/{session_id}", self._session, "A session", also={"DELETE": "Delete a session"}
            ),
            OwnRoute(
                "POST", "/v1/sessions/{session_id}/close", self._close, "Say that no more calls of a session come"
            ),
            OwnRoute(
                "DELETE",
                "/v1/sessions/{session_id}/calls/{call_id:path}",
                self._cancel,
                "Cancel a call of a session",
            ),
            _taken("/v1/variables", self._declare, "Set a variable", VariableBody),
            OwnRoute(
                "GET", "/v1/variables/{session_id}/{variable}", self._variable, "A variable's value and its state"
            ),
            _taken("/v1/submit", self._submit, "Submit a call with placeholders", SubmitBody),
            _taken("/v1/get", self._get, "Wait for a variable", GetBody, tells=("plait-slo",)),
        ]

    async def _open(self, request: Request) -> Response:
        tenant, body, annotations = await self._read(request, SessionBody)
        session_id = body.session_id or self._executor.sessions.new_id(tenant)
        session = await self._open_for(tenant, session_id, annotations, body.ttl_s)
        self._executor.prefer(session, body.objective or annotations.session_objective, loop_time_s())
        return await _stored(session, _described_session(session))

    async def _session(self, request: Request) -> Response:
        session = await self._found(request)
        if request.method == "DELETE":
            self._executor.endings.delete(session, loop_time_s())
            return await _stored(session, {"id": session.session_id, "object": "session.deleted", "deleted": True})
        counts = {str(state): count for state, count in session.graph.counts.items()}
        variables = await self._bodies.turns.run(session.tenant.name, _states(session))
        return await _stored(session, {**_described_session(session), "calls": counts, "variables": variables})

    async def _close(self, request: Request) -> Response:
        session = await self._found(request)
        self._executor.endings.close(session, loop_time_s())
        return await _stored(session, {"id": session.session_id, "object": "session.closed", "closed": True})

    async def _cancel(self, request: Request) -> Response:
        session = await self._found(request)
        call = session.calls.get(request.path_params["call_id"])
        if call is None:
            raise NotFoundError(
                f"The session '{session.session_id}' has no call of this id that has not ended.",
                code="call_not_found",
                param="call_id",
            )
        self._executor.cancel(call, loop_time_s())
        return await _stored(session, {"id": call.call_id, "object": "call.cancelled", "cancelled": True})

    async def _declare(self, request: Request) -> Response:
        tenant, body, annotations = await self._read(request, VariableBody)
        body.check()
        session = await self._open_for(tenant, body.session_id, annotations)
        name = body.semantic_var_id or f"v_{uuid.uuid4().hex}"
        if body.inputs is not None:
            declared = DeclaredStep(name, body.inputs, body.seconds or 0.0)
            self._natives.declare(session, declared, id_of(request.scope), loop_time_s())
        if body.error is not None:
            self._natives.set_failed(session, name, FailureCause(message=body.error), loop_time_s())
        if body.value is not None:
            self._natives.set_value(session, name, body.value, loop_time_s())
        return await _stored(session, _described_variable(session, name))

    async def _variable(self, request: Request) -> Response:
        session, name = await self._found(request), request.path_params["variable"]
        if not VARIABLE_NAME.fits(name):
            message = f"There is no variable of this name: a variable's name is {VARIABLE_NAME.rule}."
            raise NotFoundError(message, param="semantic_var_id")
        return await _stored(session, _described_variable(session, name))

    async def _get(self, request: Request) -> ASGIApp:
        tenant, body, annotations = await self._read(request, GetBody)
        session = await self._open_for(tenant, body.session_id, annotations)
        return VariableResponse(
            self._executor,
            session,
            body.semantic_var_id,
            mark=mark_of(body.criteria, annotations),
            timeout_s=body.timeout_s,
            keep_alive_s=self._keep_alive_s if body.stream else None,
        )

    async def _submit(self, request: Request) -> Response:
        headers = request.scope["headers"]
        tenant = self._keys.check(request.scope)
        with self._bodies.open(request.scope, tenant) as open_body:
            raw = await open_body.read(request.receive, headers)
        body, raw = mended(decode_body, raw, _SUBMIT)
        incoming = Incoming(
            "/v1/submit", headers, raw, id_of(request.scope), loop_time_s(), tenant, key=key_of(request.scope)
        )
        asked = await read_submission(self._chained.runner.reader, incoming, body, body.session_id)
        await self._entrance.whole(tenant, body.session_id)
        durable = asked.annotations.durable is not False
        session = self._executor.sessions.open(tenant, body.session_id, incoming.arrived_s, durable=durable)
        self._executor.prefer(session, asked.annotations.session_objective, incoming.arrived_s)
        call = self._submitted(session, asked)
        outputs = [
            {"name": placeholder.name, "semantic_var_id": placeholder.variable}
            for placeholder in body.placeholders
            if placeholder.in_out
        ]
        answer = {"object": "submission", "id": call.call_id, "session_id": session.session_id, "outputs": outputs}
        return await _stored(session, answer)

    async def _open_for(
        self, tenant: str, session_id: str, annotations: Annotations, ttl_s: float | None = None
    ) -> Session:
        """The session that a request names, opened if it is new. Waits while a program enters it."""
        durable = annotations.durable is not False
        await self._entrance.whole(tenant, session_id)
        return self._executor.sessions.open(tenant, session_id, loop_time_s(), ttl_s, durable=durable)

    def _submitted(self, session: Session, asked: AskedStep) -> HeldCall:
        """The new call of a submission, or the call that it repeats.

        If an input has failed, the call fails at once. The submission is accepted; getters of the outputs get the
        error.
        """
        call = ChainedCall(self._chained.runner, session, asked).call
        first = repeated(session, call)
        if first is not None:
            return first
        with suppress(FailedDependencyError):
            self._executor.add(session, call, asked.incoming.arrived_s)
        return call

    async def _found(self, request: Request) -> Session:
        """The session that the path names. Raises `NotFoundError`, or `SessionEndedError` for a deleted session."""
        tenant, session_id = self._keys.check(request.scope), request.path_params["session_id"]
        if not SESSION_ID.fits(session_id):
            message = f"There is no session of this id: a session's id is {SESSION_ID.rule}."
            raise NotFoundError(message, code="session_not_found", param="session_id")
        of_route("", request.scope["headers"], ("session_id", "session", session_id))
        await self._entrance.whole(tenant, session_id)
        return self._executor.sessions.find(tenant, session_id, loop_time_s())

    async def _read(self, request: Request, kind: type[BodyT]) -> tuple[str, BodyT, Annotations]:
        headers = request.scope["headers"]
        tenant = self._keys.check(request.scope)
        with self._bodies.open(request.scope, tenant) as open_body:
            raw = await open_body.read(request.receive, headers)
        body: BodyT
        body, _ = mended(decode_body, raw or b"{}", _DECODERS[kind])  # a new session needs no body
        said: list[Given] = [("session_id", "session", body.session_id)]
        if isinstance(body, SessionBody):
            said.append(("objective", "session_objective", body.objective))
        if isinstance(body, GetBody):
            said += given_by(body.criteria, "criteria")
        return tenant, body, of_route(request.scope["path"], headers, *said)


def _described_session(session: Session) -> dict[str, Any]:
    unix_s = time.time() - loop_time_s()
    return {
        "id": session.session_id,
        "object": "session",
        "objective": session.objective,
        "created_at": round(unix_s + session.created_s),
        "expires_at": round(unix_s + (session.touched_s + session.ttl_s)),
    }


def _described_variable(session: Session, name: str) -> dict[str, Any]:
    state, value, cause = session.state_of(name), session.values.get(name), session.graph.cause(name)
    return described(session.session_id, name, state, value, cause, was_cut=session.was_cut(name))


def _states(session: Session) -> Pieces[list[dict[str, Any]]]:
    states = []
    for name in list(session.variables()):
        states.append(_state(session, name))
        yield
    return states


def _state(session: Session, variable: str) -> dict[str, Any]:
    producer = session.graph.producer(variable)
    return {
        "semantic_var_id": variable,
        "state": session.state_of(variable),
        "producer": "client" if producer == CLIENT else producer,
        "error": described_failure(variable, session.graph.cause(variable)),
    }


async def _stored(session: Session, value: object) -> Response:
    """An answer with `value`, after the commit of the session's events; a header says if they cannot be stored."""
    return await session.record.once_stored(json_answer(value), unstored_response)
