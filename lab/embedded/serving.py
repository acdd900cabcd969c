"""What the embedded engine's routes share: its ranks and their clocks, the model, the API key; and JSON over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.backends.adapter.named_ranks import named_rank
from plait.backends.errors import AuthenticationError
from plait.backends.protocol.call_annotations import AnnotationReader
from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.lab.embedded.clock import EngineClock
from plait.lab.embedded.completion import ServedModel, Target, in_emulated_time
from plait.lab.embedded.ranks import Ranks

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
            return await answer(request)

        return Route(path, guarded, methods=[method])

    def target(self, request: Request, body: ChatRequest | CompletionRequest) -> Target:
        """Where a request runs, with its id and annotations. All its choices run on one rank."""
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        annotations = in_emulated_time(self.annotations.read(body.vllm_xargs), self.time_scale)
        named = named_rank()
        rank = self.ranks.choose() if named is None else named
        return Target(self.model, self.ranks.engines[rank], self.clocks[rank], request_id, annotations)

    def _authenticate(self, request: Request) -> None:
        """Raise AuthenticationError without the key. Anthropic's clients send it in a header of their own."""
        given = (request.headers.get("authorization"), request.headers.get("x-api-key"))
        if self.api_key is not None and given[0] != f"Bearer {self.api_key}" and given[1] != self.api_key:
            raise AuthenticationError("This engine needs its API key: send 'Authorization: Bearer KEY'.")


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
