"""The routes below `/v1/responses`: they read, cancel and delete stored and background responses."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.backends.errors import CallerError, NotFoundError
from plait.backends.protocol.api_errors import write_event
from plait.backends.translation.background_turn import replayed
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.own_route import OwnRoute
from plait.gateway.asgi import EVENT_STREAM, ClientGoneError, Headers, sink_of, unless_gone
from plait.gateway.guests.programs.unstored import unstored_events, unstored_headers, unstored_response
from plait.gateway.guests.responses.background_answer import BackgroundAnswer, events_from
from plait.gateway.guests.responses.background_api import BackgroundApi
from plait.gateway.ids import RESPONSE_ID
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.intake.turns import Pieces
from plait.gateway.timer import loop_time_s

LISTED: Final = 20
MOST_LISTED: Final = 100


class Named(NamedTuple):
    """The name of a response: ids are unique only within a tenant."""

    tenant: str
    response_id: str


PATH: Final = "/v1/responses/{response_id}"


class ResponsesApi:
    """The routes. A tenant finds only its own responses."""

    def __init__(self, background: BackgroundApi, keys: KeyRing, bodies: OpenBodies) -> None:
        chained = background.chained
        self._bodies = bodies
        self._background = background
        self._endings = chained.executor.endings
        self._stored = background.stored
        self._keep_alive_s = chained.keep_alive_s
        self._keys = keys
        self.routes = [
            OwnRoute("GET", PATH, self._get, "A response that is stored or in the background"),
            OwnRoute("DELETE", PATH, self._delete, "Forget a response"),
            OwnRoute("POST", f"{PATH}/cancel", self._cancel, "Cancel a response in the background"),
            OwnRoute("GET", f"{PATH}/input_items", self._items, "The input of a response"),
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
            none: Headers = ()
            headers = await owner.once_stored(none, unstored_headers)
            return FollowedResponse(owner.answer, headers, number, self._keep_alive_s)
        answer = self._stored.get(*named, loop_time_s()).answer
        _check_background(answer, "streamed again")
        events = events_from(number, await self._bodies.turns.run(named.tenant, _events_of(answer)))
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
        """A page of the input, the latest item first."""
        named, asked = self._named(request), ItemsPage.of(request)
        owner = self._background.find(*named)
        items = self._stored.get(*named, loop_time_s()).items if owner is None else owner.items
        return _json(await self._bodies.turns.run(named.tenant, self._page(asked, items, named)))

    def _page(self, asked: ItemsPage, items: bytes, named: Named) -> Pieces[bytes]:
        """Make the page. Until it is an answer, it counts twice: its items with their ids, and the whole."""
        size = 2 * len(items)
        self._bodies.add(named.tenant, size)
        try:
            return (yield from asked.of_items(items, named.response_id))
        finally:
            self._bodies.remove(named.tenant, size)

    def _named(self, request: Request) -> Named:
        """The tenant, and the response's id in the path. Raises `NotFoundError` for an invalid id."""
        tenant, response_id = self._keys.check(request.scope), request.path_params["response_id"]
        if not RESPONSE_ID.fits(response_id):
            message = f"There is no response of this id: a response's id is {RESPONSE_ID.rule}."
            raise NotFoundError(message, param="response_id")
        return Named(tenant, response_id)


class ItemsPage(NamedTuple):
    """The page of a response's input that a client wants."""

    limit: int
    after: str | None
    is_ascending: bool

    @classmethod
    def of(cls, request: Request) -> ItemsPage:
        """Raises `CallerError`."""
        asked = request.query_params
        limit, order = asked.get("limit", str(LISTED)), asked.get("order", "desc")
        if len(limit) > 3 or not (limit.isascii() and limit.isdigit()) or not 1 <= int(limit) <= MOST_LISTED:
            raise CallerError(f"'limit' must be a number from 1 to {MOST_LISTED}", param="limit")
        if order not in {"asc", "desc"}:
            raise CallerError("'order' must be 'asc' or 'desc'", param="order")
        return cls(int(limit), asked.get("after"), order == "asc")

    def of_items(self, items: bytes, response_id: str) -> Pieces[bytes]:
        """The page as JSON. The items stay as they are; one without an id gets the same one each time."""
        named = []
        for at, item in enumerate(_ITEMS.decode(items)):
            yield
            named.append(_named_item(item, f"item_{response_id}_{at}"))
        yield
        if not self.is_ascending:
            named.reverse()
        begin = 0
        if self.after is not None:
            begin = next((at + 1 for at, (name, _) in enumerate(named) if name == self.after), 0)
            if not begin:
                raise CallerError("'after' must be the id of an item of this list", param="after")
        page = named[begin : begin + self.limit]
        return msgspec.json.encode(
            {
                "object": "list",
                "data": [item for _, item in page],
                "first_id": page[0][0] if page else None,
                "last_id": page[-1][0] if page else None,
                "has_more": begin + self.limit < len(named),
            }
        )


class FollowedResponse(Response):
    """Streams the events of a background response that has not been stored, from the number `number` on."""

    def __init__(self, answer: BackgroundAnswer, headers: Headers, number: int, keep_alive_s: float) -> None:
        super().__init__()
        self._answer = answer
        self._head = headers
        self._number = number
        self._keep_alive_s = keep_alive_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        sink = sink_of(receive, send)
        with suppress(ClientGoneError):
            await unless_gone(receive, self._answer.follow(sink, self._head, self._number, self._keep_alive_s))


def _first_number(request: Request) -> int:
    """The sequence number of the first event that a client wants. Raises `CallerError`."""
    after = request.query_params.get("starting_after")
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) < 10):
        raise CallerError("'starting_after' must be the number of an event", param="starting_after")
    return int(after) + 1


def _events_of(answer: bytes) -> Pieces[list[bytes]]:
    """Read a stored response, which may have megabytes, and write its events."""
    written = []
    for event in replayed(msgspec.json.decode(answer)):
        written.append(write_event(event))
        yield
    return written


_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class _NamedItem(msgspec.Struct):
    id: Any = None


_ITEM_NAME = msgspec.json.Decoder(_NamedItem)


def _named_item(item: msgspec.Raw, otherwise: str) -> tuple[str, msgspec.Raw]:
    """The id of an item, and the item with it."""
    try:
        name = _ITEM_NAME.decode(item).id
    except msgspec.ValidationError:
        return otherwise, item
    if isinstance(name, str):
        return name, item
    fields = msgspec.json.decode(item, type=dict[str, msgspec.Raw])
    return otherwise, msgspec.Raw(msgspec.json.encode({**fields, "id": otherwise}))


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
