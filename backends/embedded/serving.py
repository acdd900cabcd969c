"""What the embedded engine's routes share: its ranks and their clocks, the model, the API key; and JSON over HTTP."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.backends.embedded.clock import EngineClock
from plait.backends.embedded.completion import ServedModel, Target, in_emulated_time
from plait.backends.embedded.engine import Engine
from plait.backends.embedded.rank_balancer import RankBalancer
from plait.backends.errors import AuthenticationError, CallerError
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.dialects import RANK_HEADER
from plait.backends.protocol.openai import ChatRequest, CompletionRequest

Answer = Callable[[Request], Awaitable[Response]]

_RANK = RANK_HEADER.decode()


@dataclass(slots=True, kw_only=True)
class Serving:
    """The engines that are served at one address, one for each data-parallel rank.

    In `lockstep` they share a clock. `clocks`, by rank, are set when the server starts; they need its event loop.
    """

    engines: Sequence[Engine]
    lockstep: bool
    model: ServedModel
    time_scale: float
    api_key: str | None
    annotations: AnnotationReader = field(default_factory=AnnotationReader)
    clocks: Sequence[EngineClock] = field(init=False)
    balancer: RankBalancer = field(init=False)

    def __post_init__(self) -> None:
        self.balancer = RankBalancer(self.engines)

    def start(self) -> None:
        if self.lockstep:
            self.clocks = [EngineClock(self.engines, self.time_scale)] * len(self.engines)
        else:
            self.clocks = [EngineClock([engine], self.time_scale) for engine in self.engines]

    async def close(self) -> None:
        for clock in self.clocks:
            await clock.close()

    def route(self, path: str, answer: Answer, method: str = "POST") -> Route:
        """A route that needs the API key, if the engine has one."""

        async def guarded(request: Request) -> Response:
            self._authenticate(request)
            self.named_rank(request)
            return await answer(request)

        return Route(path, guarded, methods=[method])

    def target(self, request: Request, body: ChatRequest | CompletionRequest) -> Target:
        """Where a request runs, with its id and annotations. All its choices run at one rank."""
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        annotations = in_emulated_time(self.annotations.read(body.vllm_xargs), self.time_scale)
        rank = self.named_rank(request)
        if rank is None:
            rank = self.balancer.choose(self.clocks[0].now_s()) if len(self.engines) > 1 else 0
        return Target(self.model, self.engines[rank], self.clocks[rank], request_id, annotations)

    def named_rank(self, request: Request) -> int | None:
        """The rank that a request's header names. Raises CallerError for one that is not here."""
        given = request.headers.get(_RANK)
        return None if given is None else self.rank_of(given, _RANK)

    def rank_of(self, given: str, name: str) -> int:
        """The number of a rank. Raises CallerError if there is no such rank."""
        if not re.fullmatch("[0-9]{1,9}", given) or int(given) >= len(self.engines):
            ranks = len(self.engines)
            raise CallerError(f"'{name}' must be below {ranks}, the number of ranks, not {given[:80]!r}", param=name)
        return int(given)

    def _authenticate(self, request: Request) -> None:
        """Raise AuthenticationError without the key. Anthropic's clients send it in a header of their own."""
        given = (request.headers.get("authorization"), request.headers.get("x-api-key"))
        if self.api_key is not None and given[0] != f"Bearer {self.api_key}" and given[1] != self.api_key:
            raise AuthenticationError("This engine needs its API key: send 'Authorization: Bearer KEY'.")


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
