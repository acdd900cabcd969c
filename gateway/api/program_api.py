"""`POST /v1/programs`: a whole program in one request. It is checked and entered as a whole."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.backends.errors import CallerError, ProgramTooLargeError
from plait.backends.protocol.openai import decode_body
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.criteria import Criteria, mark_of
from plait.gateway.api.program_response import AskedProgram, ProgramResponse
from plait.gateway.asgi import id_of
from plait.gateway.calls.annotations import wants_durable
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.open_bodies import OpenBodies
from plait.gateway.programs.chained_calls import ChainedCalls
from plait.gateway.programs.native_step import DeclaredStep
from plait.gateway.programs.program import named, placed
from plait.gateway.programs.submission import CallBody, SessionId, TimeToLive, VariableName
from plait.gateway.programs.submitted_call import HeldSubmission, read_submission
from plait.gateway.timer import loop_time_s

PATH = "/v1/programs"


class ProgramBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/programs`. A value that is not a text becomes its JSON text. Each call is read by itself.

    `external` are variables that others produce, perhaps later.
    """

    session: SessionId | None = None
    ttl_s: TimeToLive | None = None
    external: frozenset[VariableName] = frozenset()
    values: dict[VariableName, Any] = {}
    calls: list[msgspec.Raw] = []
    natives: list[DeclaredStep] = []
    gets: dict[VariableName, Criteria | None] = {}
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    stream: bool = False

    def texts(self) -> dict[str, str]:
        """Each value as a text."""
        return {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in self.values.items()
        }


_PROGRAM = msgspec.json.Decoder(ProgramBody)
_CALL = msgspec.json.Decoder(CallBody)


class ProgramApi:
    """The route for whole programs. It raises errors; the application answers with them."""

    def __init__(self, chained: ChainedCalls, keys: KeyRing, bodies: OpenBodies, keep_alive_s: float) -> None:
        self._chained = chained
        self._keys = keys
        self._bodies = bodies
        self._keep_alive_s = keep_alive_s
        self.routes = [Route(PATH, self._run, methods=["POST"])]

    async def _run(self, request: Request) -> Response:
        headers = request.scope["headers"]
        tenant = self._keys.check(headers)
        with self._bodies.open(tenant) as open_body:
            raw = await open_body.read(request.receive, headers)
            body = decode_body(raw, _PROGRAM)
            self._check_size(len(body.calls) + len(body.natives))
            incoming = Incoming(PATH, headers, raw, id_of(headers), loop_time_s(), tenant)
            asked = AskedProgram(
                incoming.request_id,
                tenant,
                body.session or self._chained.executor.sessions.new_id(tenant),
                body.texts(),
                [await self._read_call(index, call, incoming, body.session) for index, call in enumerate(body.calls)],
                body.natives,
                {name: mark_of(criteria) for name, criteria in body.gets.items()},
                body.external,
                body.ttl_s,
                wants_durable(headers),
            )
            keep_alive_s = self._keep_alive_s if body.stream else None
            answer = ProgramResponse(self._chained.runner, asked, timeout_s=body.timeout_s, keep_alive_s=keep_alive_s)
            await answer.enter()
        return answer

    def _check_size(self, calls: int) -> None:
        most = self._chained.executor.sessions.limits.max_program_calls
        if calls > most:
            raise ProgramTooLargeError(
                f"The program has {calls:,} calls and native steps; at most {most:,} fit into one request. Send the "
                "others in a further request with the same session.",
                param="calls",
            )

    async def _read_call(
        self, index: int, call: msgspec.Raw, incoming: Incoming, session_id: str | None
    ) -> HeldSubmission:
        """A call of the program. Raises `CallerError` that names its place in the program."""
        await self._chained.runner.slices.take(incoming.tenant)
        raw, place = bytes(call), f"calls[{index}]"
        with placed(place):
            body = decode_body(raw, _CALL)
        outputs = [placeholder.variable for placeholder in body.placeholders if placeholder.in_out]
        with placed(named(place, outputs)):
            sent = msgspec.structs.replace(incoming, body=raw, request_id=f"{incoming.request_id}:{index}")
            asked = await read_submission(self._chained.runner.reader, sent, body, session_id)
            if "session_id" in asked.submission.fields:
                raise CallerError(
                    "A call of a program takes no 'session_id'; name the session in the program.", param="session_id"
                )
        return asked
