"""The routes whose requests are LLM calls, as plain ASGI. Starlette serves all other routes (`Gateway.app`).

`CallApi` authenticates a request and reads its body. The `Preparer` of its route then makes it a call: `CompletionApi`
for chats and texts, `ForwardedApi` for other routes of engines, or one that a guest brings. A guest's `StepBefore` may
answer a completion with annotations itself, as the owner of its session or its program does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import thread_time
from typing import NamedTuple, Protocol

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.backends.errors import (
    CallerError,
    GatewayStoppingError,
    MethodNotAllowedError,
    NoWebSocketError,
    PlaitError,
)
from plait.backends.protocol.client_bodies import mended
from plait.backends.protocol.openai import ChatRequest, CompletionRequest, RequestT, parse_request
from plait.gateway.api.auth import KEY, KeyRing
from plait.gateway.api.refusals import Refusals
from plait.gateway.asgi import (
    NAME,
    UNREAD_S,
    ClientGoneError,
    ClientSink,
    OnEnd,
    Sink,
    WatchedReceive,
    WrittenClient,
    check_client,
    header,
    id_of,
    is_refused,
    sink_of,
    unless_gone,
    write_error,
)
from plait.gateway.calls.annotations import NO_ANNOTATIONS, Annotations, read_annotations
from plait.gateway.calls.call import Asked
from plait.gateway.calls.call_reader import CallReader, Incoming
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.relay import Relay
from plait.gateway.calls.routes import KINDS, ROUTES, CallRoutes, ForwardedRequest
from plait.gateway.intake.open_bodies import OpenBodies, OpenBody
from plait.gateway.others import API_KEYS, Checked, Forwarded
from plait.gateway.timer import loop_time_s
from plait.policy.types import CHARACTERS_PER_TOKEN

Answer = Callable[[], Awaitable[None]]
"""Answers a request that was read. Raises `ClientGoneError`, and before the first byte of the answer `PlaitError`."""


async def answered() -> None:
    """Nothing is left to do: another gateway has answered."""


def as_forwarded(incoming: Incoming) -> Forwarded:
    """The request as another gateway gets it."""
    checked = Checked(API_KEYS, incoming.tenant, incoming.key)
    return Forwarded("POST", incoming.path, incoming.headers, checked, incoming.body)


class Preparer(Protocol):
    """Makes calls of the requests of some routes."""

    async def prepared(self, incoming: Incoming, body: OpenBody, receive: Receive, sink: ClientSink) -> Answer:
        """Read a request, and return the function that answers it. A form is not read yet, from `receive`.

        Raises `PlaitError` or `ClientGoneError` if the request does not become a call.
        """


class AskedCompletion(NamedTuple):
    """A parsed completion with annotations, and its client."""

    incoming: Incoming
    request: ChatRequest | CompletionRequest
    annotations: Annotations
    receive: Receive
    sink: ClientSink


class StepBefore(Protocol):
    """What a guest does before a completion with annotations becomes a call."""

    async def take(self, asked: AskedCompletion) -> Answer | None:
        """What answers the request in place of a call; None: the next step has it. Raises as `Preparer.prepared`."""

    def refused(self, incoming: Incoming, error: PlaitError) -> None:
        """A completion, also one without annotations, becomes no call."""


@dataclass(frozen=True, slots=True)
class CompletionApi:
    """Serves chat and text completions. `before`: the guests' steps, in their order."""

    calls: CallReader
    relay: Relay
    before: list[StepBefore] = field(default_factory=list)

    def read(self, incoming: Incoming) -> Asked | None:
        """The call of a request; None if the request has annotations, or if threads have to tokenize its prompt.

        Raises `PlaitError`.
        """
        try:
            incoming, request = parsed(incoming, KINDS[incoming.path])
            annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
            if annotations is not NO_ANNOTATIONS:
                return None
            begun = self.calls.begin(incoming, request, annotations)
        except PlaitError as error:
            self._refused(incoming, error)
            raise
        if isinstance(begun, Asked):
            return begun
        begun.close()
        return None

    async def prepared(
        self,
        incoming: Incoming,
        _body: OpenBody | None,
        receive: Receive,
        sink: ClientSink,
        on_read: Callable[[int], None] | None = None,
    ) -> Answer:
        """As in `Preparer`. `on_read` is called with the number of prompt tokens, unless a guest answers."""
        try:
            incoming, request = parsed(incoming, KINDS[incoming.path])
            annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
            if annotations is not NO_ANNOTATIONS:
                completion = AskedCompletion(incoming, request, annotations, receive, sink)
                for step in self.before:
                    answer = await step.take(completion)
                    if answer is not None:
                        return answer
            asked = await self.calls.read(incoming, request, annotations)
        except PlaitError as error:
            self._refused(incoming, error)
            raise
        check_client(receive)
        if on_read is not None:
            on_read(asked.call.prompt_tokens or len(incoming.body) // CHARACTERS_PER_TOKEN)
        return partial(self.deliver, asked, receive, sink)

    async def deliver(self, asked: Asked, receive: Receive, sink: ClientSink) -> None:
        await unless_gone(receive, self.relay.deliver(asked, sink))

    def _refused(self, incoming: Incoming, error: PlaitError) -> None:
        for step in self.before:
            step.refused(incoming, error)


@dataclass(frozen=True, slots=True)
class ForwardedApi:
    """Forwards requests of routes whose answers are no completions, such as embeddings."""

    completions: CompletionApi

    async def prepared(self, incoming: Incoming, _body: OpenBody, receive: Receive, sink: ClientSink) -> Answer:
        """As in `Preparer`."""
        route = ROUTES[incoming.path]
        incoming, request = parsed(incoming, ForwardedRequest)
        annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
        route.check(annotations)
        asked = await self.completions.calls.forwarded(incoming, request, route, annotations)
        check_client(receive)
        return partial(self.completions.deliver, asked, receive, sink)


def parsed(incoming: Incoming, kind: type[RequestT]) -> tuple[Incoming, RequestT]:
    """The parsed request, and `incoming` with a repaired body if the client's was not valid JSON."""
    try:
        return incoming, parse_request(incoming.body, kind)
    except CallerError:
        request, body = mended(parse_request, incoming.body, kind)
        return msgspec.structs.replace(incoming, body=body), request


@dataclass(frozen=True, slots=True)
class CallApi:
    """The ASGI application of `routes`. All other requests go to `rest`.

    `preparers` are those that guests bring for their routes.
    """

    completions: CompletionApi
    routes: CallRoutes
    preparers: Mapping[str, Preparer]
    keys: KeyRing
    bodies: OpenBodies
    refusals: Refusals
    rest: ASGIApp

    def begin(
        self, scope: Scope, body: bytes, client: WrittenClient, on_end: OnEnd, in_task: Callable[[], object]
    ) -> PlainCall | None:
        """Answer a plain call without an asyncio task. At its end, `on_end` gets None, or an error that is a bug.

        Returns None for a request that may have annotations, or is no completion: `__call__` answers it. If this shows
        only after the request has waited for its turn, `in_task` is called.
        """
        path, headers = scope["path"], scope["headers"]
        if path not in KINDS or scope["method"] != "POST" or len(body) > self.bodies.short_bytes:
            return None
        if b"content-encoding" in map(NAME, headers):
            return None
        if body.find(b'"plait"') >= 0:  # faster than `in`, which first raises and catches a TypeError
            return None
        began_s, turns = thread_time(), self.bodies.turns
        arrived_s = loop_time_s() - scope.get(UNREAD_S, 0.0)
        call = PlainCall(self, Incoming(path, headers, b"", id_of(scope), arrived_s, ""), client, on_end)
        try:
            tenant = self.keys.check(scope)
        except Exception as error:  # noqa: BLE001 - a bug, too, ends the call, and goes to `on_end`
            call.refuse(error)  # without a valid key, not even the log reads the body
            return call
        call.incoming = msgspec.structs.replace(call.incoming, body=body, tenant=tenant, key=scope.get(KEY, ""))
        if turns.may_begin(tenant):
            has_begun = self._has_begun(call)
            turns.charge(tenant, thread_time() - began_s)
            return call if has_begun else None
        try:
            waiting = turns.wait(tenant, partial(self._begin_later, call, in_task), call.refuse)
        except PlaitError as error:
            call.refuse(error)
        else:
            call.leave = partial(turns.leave, tenant, waiting)
            client.on_gone = call.gone
        return call

    def _has_begun(self, call: PlainCall) -> bool:
        """Begin a call, or refuse it. False, with nothing done, if only a task can answer it."""
        tenant, size = call.incoming.tenant, len(call.incoming.body)
        try:
            self.bodies.add(tenant, size, 1)
            call.is_counted = True
            asked = self.completions.read(call.incoming)
        except Exception as error:  # noqa: BLE001 - as in `begin`
            call.refuse(error)
            return True
        if asked is None:
            call.is_counted = False
            self.bodies.remove(tenant, size, 1)
            return False
        call.client.on_gone = call.gone
        try:
            call.delivery = self.completions.relay.begin(asked, call.client, call.end)
        except Exception as error:  # noqa: BLE001 - as in `begin`
            call.end(error)
        return True

    def _begin_later(self, call: PlainCall, in_task: Callable[[], object]) -> None:
        """The turn of a call that has waited for it."""
        call.client.on_gone, call.leave = None, None
        if not self._has_begun(call):
            in_task()

    def refuse(self, incoming: Incoming, error: PlaitError, sink: Sink) -> None:
        write_error(sink, error, incoming.request_id, self.routes[incoming.path].form.errors.body(error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST. A failure before the first byte becomes an error object of the route's API.

        Raises `PlaitError` for a later failure.
        """
        path: str = scope.get("path", "")
        if path not in self.routes or scope["type"] != "http":
            await self.rest(scope, receive, send)
            return
        arrived_s = loop_time_s() - scope.get(UNREAD_S, 0.0)
        call, sink = (
            TaskCall(self, Incoming(path, scope["headers"], b"", id_of(scope), arrived_s, "")),
            sink_of(receive, send),
        )
        names_answer = self.routes[path].names_answer
        if names_answer is not None:
            sink = names_answer(sink, id_of(scope))
        try:
            tenant = call.check(scope)
            await self.bodies.turns.charged(tenant, call.answer(scope, receive, sink))
        except ClientGoneError:
            return
        except PlaitError as error:
            if isinstance(receive, WatchedReceive) and receive.has_answer:
                raise  # the answer has begun: only the server can end it
            self.refuse(call.incoming, error, sink)
            await sink.flush()


class TaskCall(msgspec.Struct, eq=False):
    """A request that an asyncio task answers, because its body is not whole yet or it has to wait."""

    api: CallApi
    incoming: Incoming
    """The parts of the request that are known so far."""

    def check(self, scope: Scope) -> str:
        """The tenant of the request. Raises `AuthenticationError`, which is logged here."""
        try:
            tenant = self.api.keys.check(scope)
        except PlaitError as error:
            self.api.refusals.no_call(self.incoming, error)
            raise
        self.incoming = msgspec.structs.replace(self.incoming, tenant=tenant, key=scope.get(KEY, ""))
        return tenant

    async def answer(self, scope: Scope, receive: Receive, sink: ClientSink) -> None:
        """Read the request, then answer it. A request that becomes no call is logged here; the relay logs calls."""
        with ExitStack() as held:
            try:
                answer = await self._prepared(held, scope, receive, sink)
            except BaseException as error:
                if not (isinstance(error, ClientGoneError) and is_refused(receive)):  # the connection logs refusals
                    self.api.refusals.no_call(self.incoming, error)
                raise
            await answer()

    async def _prepared(self, held: ExitStack, scope: Scope, receive: Receive, sink: ClientSink) -> Answer:
        api, path, tenant = self.api, self.incoming.path, self.incoming.tenant
        route = api.routes[path]
        if route.has_websocket and header(self.incoming.headers, b"sec-websocket-key") is not None:
            raise NoWebSocketError
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"{path} takes POST requests only.")
        open_body = await api.bodies.request(scope, tenant, held)
        if not route.file:
            body = await open_body.read(receive, self.incoming.headers)
            self.incoming = msgspec.structs.replace(self.incoming, body=body)
        completions = api.completions
        preparer: Preparer = completions if path in KINDS else api.preparers.get(path) or ForwardedApi(completions)
        return await preparer.prepared(self.incoming, open_body, receive, sink)


class PlainCall(msgspec.Struct, eq=False):
    """A call that callbacks answer, without an asyncio task, from its request to the end of its answer."""

    api: CallApi
    incoming: Incoming
    client: WrittenClient
    on_end: OnEnd
    delivery: Delivery | None = None
    leave: Callable[[], object] | None = None
    """Ends the wait for a turn."""
    is_counted: bool = False
    """Whether the request and its body count among the tenant's."""

    def refuse(self, error: BaseException) -> None:
        """Log a request that becomes no call, and end it."""
        self.api.refusals.no_call(self.incoming, error)
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """The call has ended. `error`: a `PlaitError` that the client has to be sent, or a bug, or None."""
        self.client.on_gone = None
        if self.is_counted:
            self.is_counted = False
            self.api.bodies.remove(self.incoming.tenant, len(self.incoming.body), 1)
        if isinstance(error, PlaitError):
            self.api.refuse(self.incoming, error, self.client)
            error = None
        self.on_end(error)

    def cancel(self, why: BaseException | None = None) -> None:
        """Cancel the call, and send the client nothing. `why`: None if the gateway stops."""
        self.client.on_gone = None
        try:
            if self.leave is not None:
                self.leave()
                self.api.refusals.no_call(self.incoming, why or GatewayStoppingError())
            if self.delivery is not None:
                self.api.completions.relay.cancel(self.delivery)
        finally:
            if self.is_counted:
                self.is_counted = False
                self.api.bodies.remove(self.incoming.tenant, len(self.incoming.body), 1)

    def gone(self) -> None:
        try:
            self.cancel(ClientGoneError())
        finally:
            self.on_end(None)
