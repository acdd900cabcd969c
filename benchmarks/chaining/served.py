"""A gateway and its engine in one process without sockets: requests over plain ASGI, an engine that answers on cue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec
from starlette.types import Message, Scope

from plait.backends.errors import EngineError
from plait.backends.http.client import HttpClient
from plait.backends.http.connection import Response
from plait.gateway.app import Gateway
from plait.gateway.asgi import Client, WatchedReceive
from plait.gateway.config.sections import AdmissionConfig, Config, EngineConfig, ModelConfig, StoreConfig
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.guests.durability.durability import Durability
from plait.gateway.guests.programs.chained_calls import ChainedCalls
from plait.gateway.guests.responses.stored_responses import StoredResponses
from plait.gateway.membership.engine_link import EngineLink

MODEL: Final = "bench"
COMPLETIONS: Final = "/v1/completions"
CONTEXT_TOKENS: Final = 100_000
ALL_AT_ONCE: Final = AdmissionConfig(ahead_s=1_000.0)
"""Every call is sent at once: a measurement waits until so many are at the engine."""
_JSON: Final = [(b"content-type", b"application/json")]


class CuedEngine:
    """Stands where the gateway has its HTTP client for an engine: a call is answered when `answer` says so."""

    def __init__(self) -> None:
        self._calls: deque[Response] = deque()
        self._came = asyncio.Event()

    def begin(self, _method: str, _path: str, _headers: Sequence[tuple[bytes, bytes]], _body: bytes) -> Response:
        """As `HttpClient.begin`."""
        response = Response(_Nowhere())
        self._calls.append(response)
        self._came.set()
        return response

    async def calls(self, number: int) -> None:
        """Return once so many calls are here that have not been answered."""
        while len(self._calls) < number:
            self._came.clear()
            await self._came.wait()

    def answer(self, body: bytes) -> None:
        """Answer the call that came first."""
        response = self._calls.popleft()
        response.status, response.headers = 200, list(_JSON)
        response.pieces.append(body)
        response.finish()


def completion(text: str) -> bytes:
    """An engine's answer with this text."""
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}
    return msgspec.json.encode({"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage})


class _Nowhere:
    """Where the responses come from: they are whole from the beginning."""

    def resume(self) -> None:
        """Nothing was paused."""

    def fail(self, error: EngineError) -> None:
        """Nothing is under way."""


class Served:
    """A gateway over one engine; its tokenizer is the one of bytes, which costs next to nothing.

    With a store it is opened by `recover`, and closed by `close`.
    """

    def __init__(self, store: StoreConfig | None = None, sessions: SessionsConfig | None = None) -> None:
        engine = EngineConfig(name="engine", url="http://127.0.0.1:1")
        models = (ModelConfig(name=MODEL, tokenizer="bytes"),)
        self.gateway = Gateway(
            Config(
                models=models,
                engines=(engine,),
                admission=ALL_AT_ONCE,
                store=store or StoreConfig(),
                sessions=sessions or SessionsConfig(),
            )
        )
        self.engine = CuedEngine()
        links = self.gateway.kernel.links
        links["engine"] = EngineLink(cast("HttpClient", self.engine))
        self.gateway.kernel.router.health.answered("engine", {MODEL: CONTEXT_TOKENS})

    async def recover(self) -> None:
        """Open the store; then sessions can be used."""
        gateway = self.gateway
        assert gateway.house[Durability] is not None
        await gateway.house[Durability].recover(
            gateway.house[ChainedCalls].runner, gateway.house[StoredResponses], gateway.kernel.router
        )

    async def close(self) -> None:
        """Close the store."""
        durability = self.gateway.house[Durability]
        if durability is not None:
            await durability.close()

    def complete(self, prompt: str, **plait: str) -> Request:
        """Send a completion, with `plait-...` headers; it runs in a task of its own."""
        body = msgspec.json.encode({"model": MODEL, "prompt": prompt, "max_tokens": 10})
        return Request(
            self.gateway, "POST", COMPLETIONS, {f"plait-{name}": value for name, value in plait.items()}, body
        )

    def get(self, session: str, variable: str, criteria: Any) -> Request:
        """Wait for a variable."""
        body = msgspec.json.encode({"session_id": session, "semantic_var_id": variable, "criteria": criteria})
        return Request(self.gateway, "POST", "/v1/get", {}, body)

    async def end(self, session: str) -> None:
        """End a session and all that waits in it."""
        await Request(self.gateway, "DELETE", f"/v1/sessions/{session}", {}, b"").task


class Request:
    """One request on its way through the gateway: `task` ends when it is answered."""

    __slots__ = ("_body", "_gone", "_pieces", "status", "task")

    def __init__(self, gateway: Gateway, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        self._body: bytes | None = body
        self._gone: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pieces: list[bytes] = []
        self.status = 0
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope: Scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": raw}
        receive = WatchedReceive(self._receive, Client())  # as the gateway's own server gives it
        self.task = asyncio.ensure_future(gateway.app(scope, receive, self._send))

    @property
    def body(self) -> bytes:
        """The answer's, so far."""
        return b"".join(self._pieces)

    async def _receive(self) -> Message:
        if self._body is None:
            return await self._gone  # never: clients here stay
        body, self._body = self._body, None
        return {"type": "http.request", "body": body}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._pieces.append(message["body"])
