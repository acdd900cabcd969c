"""The routes whose requests are LLM calls, as plain ASGI. Starlette serves all other routes (`Gateway.app`).

`CallApi` authenticates and reads a request. `CompletionApi` then answers a chat or text completion, which may be a call
of a program. `ForwardingApi` answers a request on another route of the engines: it forwards the request, or translates
it to a chat completion. Forms with files are forwarded without these two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any, Final
from urllib.parse import quote

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
from plait.backends.protocol.openai import ChatRequest, RequestT, decode_body, parse_request
from plait.backends.translation.fields import ENGINE_SPEAKS_CHAT, InexpressibleError
from plait.backends.translation.messages_request import BUDGET
from plait.backends.translation.translation import Translation
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.background_api import BECOMES_CHAT, BackgroundApi
from plait.gateway.api.error_answers import error_body
from plait.gateway.api.multipart_api import read_form
from plait.gateway.api.refusals import Refusals
from plait.gateway.api.responses_api import KeptResponse, continued, input_items, referred
from plait.gateway.api.rewritten_answer import ContinuedAnswer, TranslatedAnswer
from plait.gateway.asgi import (
    NAME,
    UNREAD_S,
    ClientGoneError,
    ClientSink,
    ClientStage,
    Headers,
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
from plait.gateway.calls.routes import (
    CHAT_PATH,
    INPUT_TOKENS_PATH,
    KINDS,
    MESSAGES_PATH,
    RESPONSES_PATH,
    ROUTES,
    CallRoute,
    ForwardedRequest,
)
from plait.gateway.calls.sealed_thoughts import MARK, SealedThoughts
from plait.gateway.calls.stored_responses import StoredResponses
from plait.gateway.chaining.chained_calls import AnsweredCall, ChainedCalls
from plait.gateway.intake.open_bodies import OpenBodies, OpenBody
from plait.gateway.intake.uploads import Upload
from plait.gateway.peers.forwarding import Forwarding, OwnedName
from plait.gateway.peers.signatures import API_KEYS, Checked, Forwarded
from plait.gateway.timer import loop_time_s
from plait.policy.types import CHARACTERS_PER_TOKEN

Fields = dict[str, Any]

Answer = Callable[[], Awaitable[None]]
"""Answers a request that was read. Raises `ClientGoneError`, and before the first byte of the answer `PlaitError`."""

_RESPONSES: Final = frozenset((RESPONSES_PATH, INPUT_TOKENS_PATH))
"""The routes whose bodies may continue a stored response."""

_SEAL: Final = MARK.encode()

_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, slots=True)
class CompletionApi:
    """Serves chat and text completions. A call of a program waits for its inputs first.

    A request for a session of another gateway is forwarded to that gateway.
    """

    calls: CallReader
    relay: Relay
    chained: ChainedCalls
    forwarding: Forwarding
    refusals: Refusals

    def read(self, incoming: Incoming) -> Asked | None:
        """The call of a request; None if the request has annotations, or if threads have to tokenize its prompt.

        Raises `PlaitError`.
        """
        try:
            incoming, request = _parsed(incoming, KINDS[incoming.path])
            annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
            if annotations is not NO_ANNOTATIONS:
                return None
            begun = self.calls.begin(incoming, request, annotations)
        except PlaitError as error:
            self.chained.refused(incoming, error)
            raise
        if isinstance(begun, Asked):
            return begun
        begun.close()
        return None

    async def prepared(
        self, incoming: Incoming, receive: Receive, sink: ClientSink, on_read: Callable[[int], None] | None = None
    ) -> Answer:
        """Read a request, and return the function that answers it.

        `on_read` is called with the number of prompt tokens, unless the call waits for its inputs. Raises `PlaitError`
        or `ClientGoneError` if the request does not become a call.
        """
        try:
            incoming, request = _parsed(incoming, KINDS[incoming.path])
            annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
            if annotations is not NO_ANNOTATIONS:
                if not self.forwarding.is_alone and await self._is_elsewhere(incoming, annotations, receive, sink):
                    return _answered
                self.calls.prompts.check(request)
                held = await self.chained.take(incoming, request, annotations)
                if held is not None:
                    return partial(self._answer_held, *held, incoming, receive, sink)
            asked = await self.calls.read(incoming, request, annotations)
        except PlaitError as error:
            self.chained.refused(incoming, error)
            raise
        check_client(receive)
        if on_read is not None:
            on_read(asked.call.prompt_tokens or len(incoming.body) // CHARACTERS_PER_TOKEN)
        return partial(self.deliver, asked, receive, sink)

    async def deliver(self, asked: Asked, receive: Receive, sink: ClientSink) -> None:
        await unless_gone(receive, self.relay.deliver(asked, sink))

    async def _answer_held(
        self, held: AnsweredCall, is_repeated: bool, incoming: Incoming, receive: Receive, sink: ClientSink
    ) -> None:
        """Send a call's answer to one of its clients. The relay logs the call; a repeated request is logged here."""
        try:
            await unless_gone(receive, self.chained.answer(held, sink.send))
        except (PlaitError, ClientGoneError, asyncio.CancelledError) as error:
            if is_repeated:
                self.refusals.no_call(incoming, error)
            raise
        else:
            if is_repeated:
                self.refusals.no_call(incoming, None, status=held.answer.status)
        finally:
            self.chained.left(held)

    async def _is_elsewhere(
        self, incoming: Incoming, annotations: Annotations, receive: Receive, sink: ClientSink
    ) -> bool:
        """Whether another gateway owns the session. If so, that gateway has answered the request, and logs the call."""
        owned, is_label = OwnedName(incoming.tenant, annotations.session), annotations.is_label
        check_client(receive)
        try:
            asked = _forwarded(incoming)
            return await self.forwarding.forward_to_owner(owned, asked, receive, sink.send, is_label=is_label)
        except ClientGoneError:
            return True


@dataclass(frozen=True, slots=True)
class ForwardingApi:
    """Serves all other calls without files: forwards them, or translates them to chat completions of this gateway.

    `stored` keeps the responses of `/v1/responses`, as OpenAI does, so that later requests can continue them.
    """

    completions: CompletionApi
    stored: StoredResponses
    thoughts: SealedThoughts

    async def prepared(self, incoming: Incoming, body: OpenBody, receive: Receive, sink: ClientSink) -> Answer:
        """Read a request, and return the function that answers it. Raises as `CompletionApi.prepared` does."""
        route = ROUTES[incoming.path]

        async def go_on() -> None:
            await body.bodies.turns.go_on(incoming.tenant, body.size)

        incoming, request = _parsed(incoming, ForwardedRequest)
        annotations = read_annotations(incoming.headers, request.plait, request.service_tier)
        chat = None
        if route.translation is None or not route.computes:
            route.check(annotations)
        if route.translation is not None:
            given = decode_body(incoming.body, _FIELDS)
            await go_on()
            holder = await self._holder(incoming, given.get("previous_response_id"))
            if holder is not None:
                check_client(receive)
                with suppress(ClientGoneError):  # the other gateway logs the call
                    await self.completions.forwarding.forward(holder, _forwarded(incoming), receive, sink.send)
                return _answered
            told = given if incoming.body.find(_SEAL) < 0 else self.thoughts.opened(incoming.tenant, given)
            previous, own = given.get("previous_response_id"), await self._referred(incoming, body, told)
            if given.get("background") and incoming.path == RESPONSES_PATH:
                return await self._in_background(incoming, annotations, own, body=body, receive=receive, sink=sink)
            fields, sink = await self._conversation(incoming, body, own, sink)
            await go_on()
            reason = self._reason_to_translate(route, request, annotations)
            if reason is not None:
                try:
                    return await self._translated(incoming, route.translation, fields, receive, sink)
                except InexpressibleError as error:
                    raise error.because(reason) from None
            chat = await _chat(route.translation, fields, go_on) if route.computes else None
            await go_on()
            if fields is not given:  # engines do not have the stored responses, so they get the whole conversation
                whole = {name: value for name, value in fields.items() if name != "previous_response_id"}
                incoming = msgspec.structs.replace(incoming, body=msgspec.json.encode(whole))
            if fields is not own and route.computes:
                sink = ContinuedAnswer(sink, str(previous))  # the engine did not get the id
        asked = await self.completions.calls.forwarded(incoming, request, route, annotations, chat=chat)
        check_client(receive)
        return partial(self.completions.deliver, asked, receive, sink)

    async def _holder(self, incoming: Incoming, previous: object) -> str | None:
        """The other gateway that has the response that a request continues; None if this or no gateway has it."""
        forwarding = self.completions.forwarding
        if incoming.path not in _RESPONSES or not isinstance(previous, str) or forwarding.is_alone:
            return None
        if self.stored.has(incoming.tenant, previous):
            return None
        stream, path = self.stored.stream(incoming.tenant, previous), f"{RESPONSES_PATH}/{quote(previous, safe='')}"
        return await forwarding.holder(stream, path, incoming.headers)

    async def _referred(self, incoming: Incoming, body: OpenBody, given: Fields) -> Fields:
        """The fields, with each reference to a stored item replaced by the item, and `store` false if nothing is."""
        if incoming.path == RESPONSES_PATH and not self.stored.stores:
            given = {**given, "store": False}
        return await referred(self.stored, body, given) if incoming.path in _RESPONSES else given

    async def _conversation(
        self, incoming: Incoming, body: OpenBody, given: Fields, sink: ClientSink
    ) -> tuple[Fields, ClientSink]:
        """The fields with the whole conversation as `input`, and a sink that stores the response.

        Without a conversation, the fields are unchanged. With `store` false, the sink is unchanged.
        """
        if incoming.path not in _RESPONSES:
            return given, sink
        fields = await continued(self.stored, body, given)
        if given.get("store") is False or incoming.path != RESPONSES_PATH:
            return fields, sink
        previous = given.get("previous_response_id")
        return fields, KeptResponse(sink, self.stored, incoming.tenant, previous, input_items(given))

    async def _in_background(
        self,
        incoming: Incoming,
        annotations: Annotations,
        own: Fields,
        *,
        body: OpenBody,
        receive: Receive,
        sink: ClientSink,
    ) -> Answer:
        """Begin a background response, which is generated even if its client does not wait."""
        background, fields = BackgroundApi(self.completions.chained), await continued(self.stored, body, own)
        try:
            owner = background.begin(incoming, annotations, own, fields)
        except InexpressibleError as error:
            raise error.because(BECOMES_CHAT) from None
        return partial(background.answer, owner, incoming, receive, sink)

    def _reason_to_translate(self, route: CallRoute, request: ForwardedRequest, annotations: Annotations) -> str | None:
        """Why a request has to be translated to a chat completion; None: the engines' own route serves it."""
        calls = self.completions.calls
        models = calls.router.models
        model = models.check(request.model)
        if not models.all_have(model, route.path):
            return ENGINE_SPEAKS_CHAT
        if not annotations.is_label:
            return "a call with inputs, an output or a condition becomes a chat completion"
        if calls.isolate_tenants and route.computes and models.lack_field(model, route.path, "cache_salt"):
            return f"tenants are isolated here, and {route.path} of an engine takes no 'cache_salt'"
        return None

    async def _translated(
        self, incoming: Incoming, translation: Translation, fields: Fields, receive: Receive, sink: ClientSink
    ) -> Answer:
        """Translate a request to a chat completion, read that, and return the function that answers the request."""
        if not ROUTES[incoming.path].computes:
            prompt = parse_request(msgspec.json.encode(translation.to_count(fields)), ChatRequest)
            answer = translation.counted(await self.completions.calls.count(incoming, prompt))
            return partial(self._counted, incoming, answer, sink)
        asked, ignored = translation.to_chat(fields), translation.ignored(fields)
        models = self.completions.calls.router.models
        is_ours = BUDGET in asked and BUDGET not in fields
        if is_ours and not models.budget_thoughts(models.check(asked.get("model", ""))):
            del asked[BUDGET]
            ignored.append("thinking.budget_tokens")
        translator = translation.answer(fields, partial(self.thoughts.seal, incoming.tenant))
        told = TranslatedAnswer(sink, translator, translation, ignored)
        chat = msgspec.structs.replace(incoming, path=CHAT_PATH, body=msgspec.json.encode(asked), is_translated=True)
        return await self.completions.prepared(chat, receive, told, told.expect_prompt)

    async def _counted(self, incoming: Incoming, answer: bytes, sink: ClientSink) -> None:
        self.completions.refusals.no_call(incoming, None)
        headers = [(b"content-type", b"application/json"), (b"x-request-id", incoming.request_id.encode("latin-1"))]
        sink.whole(200, headers, answer)
        await sink.flush()


class NamedAnswer(ClientStage):
    """Names the request as Anthropic's API does."""

    def __init__(self, to: ClientSink, request_id: str) -> None:
        super().__init__(to)
        self._name = b"request-id", request_id.encode("latin-1")

    def head(self, headers: Headers) -> Headers:
        return [*headers, self._name]


async def _answered() -> None:
    """Nothing is left to do: another gateway has answered."""


def _parsed(incoming: Incoming, kind: type[RequestT]) -> tuple[Incoming, RequestT]:
    """The parsed request, and `incoming` with a repaired body if the client's was not valid JSON."""
    try:
        return incoming, parse_request(incoming.body, kind)
    except CallerError:
        request, body = mended(parse_request, incoming.body, kind)
        return msgspec.structs.replace(incoming, body=body), request


def _forwarded(incoming: Incoming) -> Forwarded:
    return Forwarded("POST", incoming.path, incoming.headers, Checked(API_KEYS, incoming.tenant), incoming.body)


async def _chat(translation: Translation, fields: Fields, go_on: Callable[[], Awaitable[None]]) -> ChatRequest | None:
    """The chat that an engine would make of a request, to compute its tokens here; None if there is no translation."""
    try:
        body = msgspec.json.encode(translation.to_chat(fields))
        await go_on()
        return parse_request(body, ChatRequest)
    except CallerError:
        return None


@dataclass(frozen=True, slots=True)
class CallApi:
    """The ASGI application of the routes in `ROUTES`. All other requests go to `rest`."""

    completions: CompletionApi
    others: ForwardingApi
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
        call.incoming = msgspec.structs.replace(call.incoming, body=body, tenant=tenant)
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
        write_error(sink, error, incoming.request_id, error_body(incoming.path, error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST. A failure before the first byte becomes an error object of the route's API.

        Raises `PlaitError` for a later failure.
        """
        path: str = scope.get("path", "")
        if path not in ROUTES or scope["type"] != "http":
            await self.rest(scope, receive, send)
            return
        arrived_s = loop_time_s() - scope.get(UNREAD_S, 0.0)
        call, sink = (
            TaskCall(self, Incoming(path, scope["headers"], b"", id_of(scope), arrived_s, "")),
            sink_of(receive, send),
        )
        if path == MESSAGES_PATH:
            sink = NamedAnswer(sink, id_of(scope))
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
        self.incoming = msgspec.structs.replace(self.incoming, tenant=tenant)
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
        if path == RESPONSES_PATH and header(self.incoming.headers, b"sec-websocket-key") is not None:
            raise NoWebSocketError
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"{path} takes POST requests only.")
        open_body = await api.bodies.request(scope, tenant, held)
        if ROUTES[path].has_files:
            upload = held.enter_context(Upload())
            asked = await read_form(api.completions.calls, self.incoming, open_body, receive, upload)
            check_client(receive)
            return partial(api.completions.deliver, asked, receive, sink)
        body = await open_body.read(receive, self.incoming.headers)
        self.incoming = msgspec.structs.replace(self.incoming, body=body)
        if path in KINDS:
            return await api.completions.prepared(self.incoming, receive, sink)
        return await api.others.prepared(self.incoming, open_body, receive, sink)


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
