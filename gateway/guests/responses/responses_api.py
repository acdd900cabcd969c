"""Stores responses on their way to the client, and inserts stored conversations into requests."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from plait.backends.errors import CallerError
from plait.gateway.answers.event_bytes import events_of, with_data
from plait.gateway.answers.other_answers import Json, json_object
from plait.gateway.asgi import ClientSink, ClientStage, Headers
from plait.gateway.guests.programs.unstored import unstored_event, unstored_headers
from plait.gateway.guests.responses.stored_responses import SHOWN, StoredResponses
from plait.gateway.ids import RESPONSE_ID
from plait.gateway.intake.open_bodies import OpenBody
from plait.gateway.timer import loop_time_s

_Held = tuple[str, Callable[[bool], None]]
"""The id of a response that is being stored, and what writes the end of its answer."""

_ENDS: Final = frozenset(("response.completed", "response.incomplete"))
_LAST_EVENT: Final = re.compile(rb"response\.(?:completed|incomplete)")
"""What an event that ends a response has in it. A text may have it, too."""


_OF_RESPONSE: Final = b'"response"'


class ContinuedAnswer(ClientStage):
    """Sets `previous_response_id` in an answer, because the engine got the whole conversation instead of the id."""

    def __init__(self, to: ClientSink, previous: str) -> None:
        super().__init__(to)
        self._previous = previous

    def body(self, status: int, body: bytes | bytearray) -> bytes | bytearray:
        response = json_object(body) if status == 200 else None
        return body if response is None else msgspec.json.encode(self._told(response))

    def events(self, events: bytes) -> bytes:
        """Whole events, with the id set in each response object."""
        if _OF_RESPONSE not in events:
            return events
        return b"".join(map(self._event, events_of(events)))

    def _event(self, event: bytes) -> bytes:
        fields = json_object(event.partition(b"data:")[2]) if _OF_RESPONSE in event else None
        if fields is None or not isinstance(fields.get("response"), dict):
            return event
        return with_data(event, {**fields, "response": self._told(fields["response"])})

    def _told(self, response: Json) -> Json:
        return {**response, "previous_response_id": self._previous}


class KeptResponse(ClientStage):
    """Stores a response on its way to the client, so that later requests can continue it.

    The end of the answer waits for the commit, in `flush`. If the response cannot be stored, a header says so, or in a
    stream the last event. `previous` is the id of the response that this one continues, `items` the request's own
    input.
    """

    def __init__(
        self, to: ClientSink, stored: StoredResponses, tenant: str, previous: str | None, items: list[Any]
    ) -> None:
        super().__init__(to)
        self._stored = stored
        self._tenant = tenant
        self._previous = previous
        self._items = items
        self._held: _Held | None = None
        self._later: list[Callable[[], None]] = []  # what is written while the end is held
        self._turn: asyncio.Future[None] | None = None  # of `flush`, until the end is held

    @property
    def is_drained(self) -> bool:
        """Whether the client has been sent all that was written."""
        return self._held is None and super().is_drained

    def whole(self, status: int, headers: Headers, body: bytes | bytearray) -> None:
        def write(is_stored: bool) -> None:
            self._to.whole(status, headers if is_stored else unstored_headers(headers), body)

        self._keep(json_object(body) if status == 200 else None, write)

    def write(self, body: bytes) -> None:
        self._events(body, self._to.write)

    def end(self, body: bytes = b"") -> None:
        self._events(body, self._to.end)

    def _events(self, events: bytes, write: Callable[[bytes], None]) -> None:
        """Write whole events. The event that ends the response waits for the commit."""
        if self._held is not None:
            self._later.append(partial(write, events))
        elif _LAST_EVENT.search(events) is None:
            write(events)
        else:
            parts = events_of(events)
            ended = ((place, _ended_response(event)) for place, event in enumerate(parts))
            place, response = next((one for one in ended if one[1] is not None), (0, None))

            def write_last(is_stored: bool) -> None:
                if not is_stored:
                    parts[place] = unstored_event(parts[place])
                write(b"".join(parts))

            self._keep(response, write_last)

    def _keep(self, response: object, write: Callable[[bool], None]) -> None:
        """Store the `response`, then `write` the answer, which is told whether it is stored."""
        if not isinstance(response, dict):
            write(True)  # an error: nothing is to be stored
            return
        response_id = response.get("id")
        if not RESPONSE_ID.fits(response_id):
            self._stored.leave_out(response_id)
            write(False)
            return
        is_kept = self._stored.put(
            self._tenant,
            response_id,
            previous=self._previous,
            items=msgspec.json.encode(self._items),
            answer=msgspec.json.encode(response),
            now_s=loop_time_s(),
        )
        if not is_kept:
            write(False)
            return
        self._held = response_id, write
        self._end_turn()

    async def flush(self, until: asyncio.Future[Any] | None = None) -> None:
        while self._held is not None or (until is not None and not until.done()):
            if self._held is not None:
                response_id, write = self._held
                is_stored = await self._stored.once_stored(self._tenant, response_id, True, lambda _: False)
                self._held, later, self._later = None, self._later, []
                write(is_stored)
                for write_more in later:
                    write_more()
                if self._to.is_drained and self.on_room is not None:
                    self.on_room()
            elif until is not None:
                self._turn = asyncio.get_running_loop().create_future()
                until.add_done_callback(self._end_turn)
                await self._to.flush(self._turn)
        await self._to.flush(until)

    def _end_turn(self, _until: object = None) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


def _ended_response(event: bytes) -> object:
    """The response of an event that ends it; None for any other event, whatever its texts mention."""
    data = json_object(event.partition(b"data:")[2]) or {}
    kind = data.get("type") or event.removeprefix(b"event:").partition(b"\n")[0].strip().decode("ascii", "replace")
    return data.get("response") if isinstance(kind, str) and kind in _ENDS else None


async def continued(stored: StoredResponses, body: OpenBody, fields: Json) -> Json:
    """The fields, with the stored conversation in front of their input, which counts as a part of the `body`.

    Raises `CallerError` if it is not stored, and for `background` or `store` that is no boolean, and
    `BodyTooLargeError` or `LimitError` beyond the limits of bodies.
    """
    for name in ("background", "store"):
        if not isinstance(fields.get(name), bool | None):
            raise CallerError(f"'{name}' must be a boolean", param=name)
    if fields.get("conversation") is not None:
        raise CallerError(
            "There are no stored conversations here. Continue a response with 'previous_response_id'.",
            param="conversation",
        )
    previous = fields.get("previous_response_id")
    if previous is None:
        return fields
    if not isinstance(previous, str):
        raise CallerError("'previous_response_id' must be a string", param="previous_response_id")
    said_before = stored.said_before(body.tenant, previous, body.hold, loop_time_s())
    return {**fields, "input": await body.bodies.turns.run(body.tenant, said_before) + input_items(fields)}


async def referred(stored: StoredResponses, body: OpenBody, fields: Json) -> Json:
    """The fields, with each reference to a stored item replaced by the item. References to other items stay.

    Raises `CallerError` for two references to one item: a short request could expand without limit.
    """
    given = fields.get("input")
    if not isinstance(given, list):
        return fields
    places = Counter(item["id"] for item in given if _is_reference(item))
    if not places:
        return fields
    (most, times), *_ = places.most_common(1)
    if times > 1:
        raise CallerError(f"'input' refers to the item '{most[:SHOWN]}' {times} times", param="input")
    items = stored.items(body.tenant, places.keys(), body.hold, loop_time_s())
    found = await body.bodies.turns.run(body.tenant, items)
    return {**fields, "input": [found.get(item["id"], item) if _is_reference(item) else item for item in given]}


def _is_reference(item: object) -> bool:
    """Whether an item is only the name of another one. Some clients so send back a thought that came with a text."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    is_empty = not any(map(item.get, ("content", "summary", "encrypted_content")))
    return item.get("type") == "item_reference" or (item.get("type") == "reasoning" and is_empty)


def input_items(fields: Json) -> list[Any]:
    """The request's input as a list of items. A text is one message of the user."""
    given = fields.get("input")
    if isinstance(given, list):
        return given
    return [] if given is None else [{"type": "message", "role": "user", "content": given}]
