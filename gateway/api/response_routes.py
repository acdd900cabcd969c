"""The routes below `/v1/responses`: they read, cancel and delete stored and background responses."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.backends.errors import CallerError, NotFoundError
from plait.backends.translation.answer_translator import write_event
from plait.backends.translation.background_turn import replayed
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.background_api import BackgroundApi
from plait.gateway.asgi import EVENT_STREAM, ClientGoneError, Headers, unless_gone
from plait.gateway.chaining.background_answer import BackgroundAnswer, events_from
from plait.gateway.chaining.chained_calls import ChainedCalls
from plait.gateway.chaining.unstored import unstored_events, unstored_headers, unstored_response
from plait.gateway.ids import RESPONSE_ID
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.timer import loop_time_s


class Named(NamedTuple):
    """The name of a response: ids are unique only within a tenant."""

    tenant: str
    response_id: str


class ResponsesApi:
    """The routes. A tenant finds only its own responses."""

    def __init__(self, chained: ChainedCalls, keys: KeyRing, bodies: OpenBodies) -> None:
        self._bodies = bodies
        self._background = BackgroundApi(chained)
        self._endings = chained.executor.endings
        self._stored = chained.runner.stored
        self._keep_alive_s = chained.keep_alive_s
        self._keys = keys
        self.routes = [
            Route("/v1/responses/{response_id}", self._get, methods=["GET"]),
            Route("/v1/responses/{response_id}", self._delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", self._cancel, methods=["POST"]),
            Route("/v1/responses/{response_id}/input_items", self._items, methods=["GET"]),
        ]

    async def _get(self, request: Request) -> ASGIApp:
        named = self._named(request)
        if request.query_params.get("stream") == "true":
            return await self._stream(named, _first_number(request))
        owner = self._background.find(*named)
        if owner is not None:
            return await owner.once_stored(_json(owner.answer.response), unstored_response)
        answer = self._stored.get(*named, loop_time_s()).answer
        is_background = _background_of(answer)
        return await self._stored.once_stored(*named, _json(answer), unstored_response, in_background=is_background)

    async def _stream(self, named: Named, number: int) -> ASGIApp:
        owner = self._background.find(*named)
        if owner is not None:
            self._bodies.check(named.tenant)
            none: Headers = ()
            headers = await owner.once_stored(none, unstored_headers)
            return self._bodies.counted(
                named.tenant, FollowedResponse(owner.answer, headers, number, self._keep_alive_s)
            )
        answer = self._stored.get(*named, loop_time_s()).answer
        _check_background(answer, "streamed again")
        events = events_from(number, list(map(write_event, replayed(msgspec.json.decode(answer)))))
        events = await self._stored.once_stored(*named, events, unstored_events, in_background=True)
        response = Response(b"".join(events))
        response.raw_headers[:0] = EVENT_STREAM
        return response

    async def _cancel(self, request: Request) -> Response:
        named = self._named(request)
        owner = self._background.find(*named)
        if owner is not None:
            owner.cancel()
            return await owner.once_stored(_json(owner.answer.response), unstored_response)
        answer = self._stored.get(*named, loop_time_s()).answer
        _check_background(answer, "cancelled")
        return await self._stored.once_stored(*named, _json(answer), unstored_response, in_background=True)

    async def _delete(self, request: Request) -> Response:
        named = self._named(request)
        owner = self._background.find(*named)
        if owner is None:
            self._stored.delete(*named, loop_time_s())
        else:
            self._endings.end(owner.session, "was deleted", loop_time_s())
        body = {"id": named.response_id, "object": "response", "deleted": True}
        return await self._stored.once_stored(*named, _json(msgspec.json.encode(body)), unstored_response)

    async def _items(self, request: Request) -> Response:
        """The input, the latest item first, all of it on one page."""
        named = self._named(request)
        owner = self._background.find(*named)
        items = self._stored.get(*named, loop_time_s()).items if owner is None else owner.items
        data = msgspec.json.decode(items, type=list[object])[::-1]
        return _json(msgspec.json.encode({"object": "list", "data": data, "has_more": False}))

    def _named(self, request: Request) -> Named:
        """The tenant, and the response's id in the path. Raises `NotFoundError` for an invalid id."""
        tenant, response_id = self._keys.check(request.scope), request.path_params["response_id"]
        if not RESPONSE_ID.fits(response_id):
            message = f"There is no response of this id: a response's id is {RESPONSE_ID.rule}."
            raise NotFoundError(message, param="response_id")
        return Named(tenant, response_id)


class FollowedResponse(Response):
    """Streams the events of a running background response, from the sequence number `number` on."""

    def __init__(self, answer: BackgroundAnswer, headers: Headers, number: int, keep_alive_s: float) -> None:
        super().__init__()
        self._answer = answer
        self._head = headers
        self._number = number
        self._keep_alive_s = keep_alive_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            await unless_gone(receive, self._answer.follow(send, self._head, self._number, self._keep_alive_s))


def _first_number(request: Request) -> int:
    """The sequence number of the first event that a client wants. Raises `CallerError`."""
    after = request.query_params.get("starting_after")
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) < 10):
        raise CallerError("'starting_after' must be the number of an event", param="starting_after")
    return int(after) + 1


class _Kind(msgspec.Struct):
    background: Any = False


_KIND = msgspec.json.Decoder(_Kind)


def _background_of(answer: bytes) -> bool:
    return _KIND.decode(answer).background is True


def _check_background(answer: bytes, done: str) -> None:
    """Raise `CallerError` for a response that was not made in the background."""
    if not _background_of(answer):
        raise CallerError(f"Only a response that was made with 'background' can be {done}.", param="response_id")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
