"""Stores responses on their way to the client, and inserts stored conversations into requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from starlette.types import Message, Send

from plait.backends.errors import CallerError
from plait.backends.http.content_types import is_event_stream
from plait.gateway.answers.event_bytes import events_of, with_data
from plait.gateway.answers.other_answers import Json, json_object
from plait.gateway.calls.stored_responses import SHOWN, StoredResponses
from plait.gateway.chaining.unstored import unstored_event, unstored_headers
from plait.gateway.ids import RESPONSE_ID
from plait.gateway.intake.open_bodies import OpenBody
from plait.gateway.timer import loop_time_s

T = TypeVar("T")

_OF_RESPONSE: Final = b'"response"'
_LAST_EVENTS: Final = (b"response.completed", b"response.incomplete")


@dataclass(slots=True)
class KeptResponse:
    """Stores a response on its way to the client, so that later requests can continue it.

    The end of the answer waits for the commit. If the response cannot be stored, a header says so, or in a stream the
    last event.
    """

    stored: StoredResponses
    tenant: str

    previous: str | None
    """The id of the response that this one continues."""

    items: list[Any]
    """The request's own input, which is stored with the response."""

    to_client: Send
    _is_stream: bool = False

    _head: Message | None = None
    """The head of an unstreamed answer with status 200, kept back until the body is whole."""

    _is_good: bool = False
    """Whether the answer's status is 200. Any other answer is not stored."""

    _parts: bytearray = field(default_factory=bytearray)
    """The body of an unstreamed answer so far."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_good = message["status"] == 200
            self._is_stream = is_event_stream(message["headers"])
            if self._is_good and not self._is_stream:
                self._head = message
                return
        elif self._head is not None:
            self._parts += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole(self._head)
            return
        elif self._is_good:
            message = {**message, "body": await self._stored_events(message.get("body", b""))}
        await self.to_client(message)

    async def _send_whole(self, head: Message) -> None:
        headers = await self._once_stored(json_object(self._parts), head["headers"], unstored_headers)
        await self.to_client({**head, "headers": headers})
        await self.to_client({"type": "http.response.body", "body": bytes(self._parts)})

    async def _stored_events(self, events: bytes) -> bytes:
        """Forward whole events. The event that ends the response waits for the commit."""
        if not any(name in events for name in _LAST_EVENTS):
            return events
        parts = events_of(events)
        for number, event in enumerate(parts):
            if any(name in event for name in _LAST_EVENTS):
                data = json_object(event.partition(b"data:")[2]) or {}
                parts[number] = await self._once_stored(data.get("response"), event, unstored_event)
        return b"".join(parts)

    async def _once_stored(self, response: object, answer: T, unstored: Callable[[T], T]) -> T:
        """Store the `response`. Returns `answer` after the commit, or `unstored(answer)` if storing fails."""
        if not isinstance(response, dict):
            return answer
        response_id = response.get("id")
        if not RESPONSE_ID.fits(response_id):
            self.stored.leave_out(response_id)
            return unstored(answer)
        is_kept = self.stored.put(
            self.tenant,
            response_id,
            previous=self.previous,
            items=msgspec.json.encode(self.items),
            answer=msgspec.json.encode(response),
            now_s=loop_time_s(),
        )
        if not is_kept:
            return unstored(answer)
        return await self.stored.once_stored(self.tenant, response_id, answer, unstored)


class ContinuedResponse:
    """Sets `previous_response_id` in an answer, because the engine got the whole conversation instead of the id."""

    def __init__(self, previous: str) -> None:
        self._previous = previous

    def whole(self, answer: bytes) -> bytes:
        response = json_object(answer)
        return answer if response is None else msgspec.json.encode(self._told(response))

    def feed(self, events: bytes) -> bytes:
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
