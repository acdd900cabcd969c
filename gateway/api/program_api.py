"""`POST /v1/programs`: a whole program in one request. It is checked and entered as a whole."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.backends.errors import ProgramTooLargeError
from plait.backends.protocol.openai import decode_body
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.awaited_variable import AwaitedVariable, Criteria, mark_of
from plait.gateway.api.program_response import ProgramResponse
from plait.gateway.asgi import id_of
from plait.gateway.calls.annotations import wants_durable
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.open_bodies import OpenBodies, OpenBody
from plait.gateway.programs.chained_calls import ChainedCalls
from plait.gateway.programs.native_step import DeclaredStep
from plait.gateway.programs.program import AskedProgram, enter, read_calls
from plait.gateway.programs.submission import SessionId, TimeToLive, VariableName
from plait.gateway.timer import loop_time_s

PATH = "/v1/programs"


class ProgramBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/programs`. A value that is not a text becomes its JSON text. Each call is read by itself.

    `external` are variables that others produce, perhaps later.
    """

    session: SessionId | None = None
    """None: a new one."""

    ttl_s: TimeToLive | None = None
    """Replaces the session's time to live."""

    external: frozenset[VariableName] = frozenset()
    values: dict[VariableName, Any] = {}

    calls: list[msgspec.Raw] = []
    """Each a `CallBody`."""

    natives: list[DeclaredStep] = []
    """What the client computes between calls."""

    gets: dict[VariableName, Criteria | None] = {}
    """What the client waits for, and with which objective."""

    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    """How long it waits."""

    stream: bool = False
    """Whether it gets events as they come."""

    def texts(self) -> dict[str, str]:
        """Each value as a text."""
        return {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in self.values.items()
        }


_PROGRAM = msgspec.json.Decoder(ProgramBody)


class ProgramApi:
    """The route for whole programs. It raises errors; the application answers with them."""

    def __init__(self, chained: ChainedCalls, keys: KeyRing, bodies: OpenBodies, keep_alive_s: float) -> None:
        self._chained = chained
        self._keys = keys
        self._bodies = bodies
        self._keep_alive_s = keep_alive_s
        self.routes = [Route(PATH, self._run, methods=["POST"])]

    async def _run(self, request: Request) -> Response:
        executor, headers = self._chained.executor, request.scope["headers"]
        tenant = self._keys.check(headers)
        with OpenBody(self._bodies, tenant) as open_body:
            raw = await open_body.read(request.receive, headers)
            body = decode_body(raw, _PROGRAM)
            self._check_size(len(body.calls) + len(body.natives))
            incoming = Incoming(PATH, headers, raw, id_of(headers), loop_time_s(), tenant)
            changed = asyncio.Event()
            awaited = [
                AwaitedVariable(name, mark_of(criteria), changed, streamed=body.stream)
                for name, criteria in body.gets.items()
            ]
            asked = AskedProgram(
                incoming.request_id,
                tenant,
                body.session or executor.sessions.new_id(tenant),
                body.texts(),
                await read_calls(self._chained.runner, body.calls, incoming, body.session),
                body.natives,
                [one.getter for one in awaited],
                body.external,
                body.ttl_s,
                wants_durable(headers),
            )
            session, call_ids = await enter(self._chained.runner, asked)
        return ProgramResponse(
            executor,
            session,
            call_ids,
            awaited,
            changed,
            timeout_s=body.timeout_s,
            keep_alive_s=self._keep_alive_s if body.stream else None,
        )

    def _check_size(self, calls: int) -> None:
        most = self._chained.executor.sessions.limits.max_program_calls
        if calls > most:
            raise ProgramTooLargeError(
                f"The program has {calls:,} calls and native steps; at most {most:,} fit into one request. Send the "
                "others in a further request with the same session.",
                param="calls",
            )
