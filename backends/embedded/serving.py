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
from plait.backends.embedded.ranks import Ranks
from plait.backends.errors import AuthenticationError, CallerError
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.dialects import RANK_HEADER
from plait.backends.protocol.openai import ChatRequest, CompletionRequest

Answer = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True, kw_only=True)
class Serving:
    """The ranks that are served at one address. `clocks` are set when the server starts; they need its event loop."""

    ranks: Ranks
    model: ServedModel
    time_scale: float
    api_key: str | None
    annotations: AnnotationReader = field(default_factory=AnnotationReader)
    clocks: Sequence[EngineClock] = field(init=False)
    """By rank. In lockstep, all ranks have one clock."""

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
        named = self.named_rank(request)
        rank = self.ranks.choose() if named is None else named
        return Target(self.model, self.ranks.engines[rank], self.clocks[rank], request_id, annotations)

    def named_rank(self, request: Request) -> int | None:
        """The rank that a request's header names. Raises CallerError for one that is not here."""
        value = dict(request.scope["headers"]).get(RANK_HEADER)
        if value is None:
            return None
        given, name = value.decode("latin-1"), RANK_HEADER.decode()
        if not re.fullmatch("[0-9]{1,9}", given):
            raise CallerError(f"'{name}' must be a whole number, not {given[:80]!r}", param=name)
        return self.checked_rank(int(given), name)

    def checked_rank(self, rank: int, param: str) -> int:
        """The rank. Raises CallerError for one that is not here."""
        if rank >= len(self.ranks.engines):
            raise CallerError(f"'{param}' must be below {len(self.ranks.engines)}, not {rank}", param=param)
        return rank

    def _authenticate(self, request: Request) -> None:
        """Raise AuthenticationError without the key. Anthropic's clients send it in a header of their own."""
        given = (request.headers.get("authorization"), request.headers.get("x-api-key"))
        if self.api_key is not None and given[0] != f"Bearer {self.api_key}" and given[1] != self.api_key:
            raise AuthenticationError("This engine needs its API key: send 'Authorization: Bearer KEY'.")


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
