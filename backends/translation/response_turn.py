"""An assistant's turn as a `response` object of OpenAI's Responses API, and as the events that let it grow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from plait.backends.translation.chat_answer import Part, Reasoning, Refusal, Text, ToolCall, Usage
from plait.backends.translation.events import Event
from plait.backends.translation.fields import Json
from plait.backends.translation.identity import Identity
from plait.backends.translation.response_output import CallItem, Item, MessageItem, ReasoningItem
from plait.backends.translation.responses_request import wants_logprobs

# finish reason -> why the response is incomplete
INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}

# field -> its value if the request has none
_ECHOED: Final[Mapping[str, Any]] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None, "reasoning": None,
    "safety_identifier": None, "store": True, "temperature": None, "text": {"format": {"type": "text"}},
    "tool_choice": "auto", "tools": [], "top_logprobs": None, "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip


class ResponseTurn:
    """Implements Turn. `fields` are the request's; the response repeats many of them."""

    def __init__(self, fields: Mapping[str, Any], identity: Identity) -> None:
        self._key = identity.key
        self._logprobs = wants_logprobs(fields)
        self._items: list[Item] = []
        self._calls: dict[int, CallItem] = {}
        self._number = 0
        echoed = {name: default if fields.get(name) is None else fields[name] for name, default in _ECHOED.items()}
        self._response: Json = {
            "id": f"resp_{identity.key}",
            "object": "response",
            "created_at": identity.created_s,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": fields.get("model") or "",
            "output": [],
            "usage": None,
            **echoed,
        }

    def answer(self) -> Json:
        """The response as it is now."""
        return {**self._response, "output": [item.body() for item in self._items]}

    def begin(self, model: str) -> Iterable[Event]:
        """`response.created` and `response.in_progress`."""
        if model:
            self._response["model"] = model
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def take(self, part: Part) -> Iterable[Event]:
        """A new item where the part does not continue the last one, and the part's delta."""
        item, events = self._item_for(part)
        return [*events, *self._numbered(item.add(part))]

    def end(self, finish_reason: str | None, stop: str | None, usage: Usage) -> Iterable[Event]:  # noqa: ARG002
        """The end of the last item, and `response.completed` or `response.incomplete`."""
        reason = INCOMPLETE.get(finish_reason or "")
        status = "completed" if reason is None else "incomplete"
        events = self._close(status)
        self._response |= {
            "status": status,
            "incomplete_details": None if reason is None else {"reason": reason},
            "usage": _usage(usage),
        }
        return [*events, self._lifecycle(status)]

    def fail(self, error: Mapping[str, Any]) -> Iterable[Event]:
        """`response.failed`, if the response has begun, and an `error` event, at which the SDKs raise."""
        events = list[Event]()
        if self._number:
            message = str(error.get("message") or "The engine has failed.")
            self._response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
            events.append(self._lifecycle("failed"))
        return [*events, error_event(error, self._next_number())]

    def _item_for(self, part: Part) -> tuple[Item, list[Event]]:
        if isinstance(part, ToolCall):
            call = self._calls.get(part.index)
            if call is not None and call.continues(part):
                return call, []
        elif self._items and self._items[-1].continues(part):
            return self._items[-1], []
        events = self._close("completed")
        item = self._new_item(part, len(self._items))
        self._items.append(item)
        return item, [*events, *self._numbered(item.opening())]

    def _new_item(self, part: Part, position: int) -> Item:
        suffix = f"{self._key}_{position}"
        match part:
            case Reasoning():
                return ReasoningItem(f"rs_{suffix}", position)
            case Text() | Refusal():
                return MessageItem(f"msg_{suffix}", position, self._logprobs)
            case ToolCall():
                call = CallItem(f"fc_{suffix}", position, part.call_id or f"call_{suffix}", part.name or "")
                self._calls[part.index] = call
                return call

    def _close(self, status: str) -> list[Event]:
        return list(self._numbered(self._items[-1].close(status))) if self._items else []

    def _lifecycle(self, what: str) -> Event:
        return {"type": f"response.{what}", "response": self.answer(), "sequence_number": self._next_number()}

    def _numbered(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            yield {**event, "sequence_number": self._next_number()}

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1


def error_event(error: Mapping[str, Any], number: int) -> Event:
    """An `error` event for OpenAI's error object. `error` in it lets OpenAI's SDKs raise."""
    code = error.get("code")
    return {
        "type": "error",
        "code": None if code is None else str(code),
        "message": str(error.get("message") or "The engine has failed."),
        "param": error.get("param"),
        "sequence_number": number,
        "error": error,
    }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
