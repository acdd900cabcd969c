"""OpenAI's Responses API (`POST /v1/responses`) over chat completions.

An assistant's turn is a `response` object and the events of its growth. Its output has items: messages, reasoning and
calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from plait.backends.protocol.api_errors import Event, overflow_fields, response_error
from plait.backends.translation.answer_translator import Identity, Part
from plait.backends.translation.chat_answer import Reasoning, Refusal, Text, Usage
from plait.backends.translation.fields import Json, Seal
from plait.backends.translation.responses_request import wants_logprobs
from plait.backends.translation.responses_tools import FUNCTION, ResponseTools, ToolKind
from plait.backends.translation.tool_calls import ToolCall


class Item(Protocol):
    """An item of the output. The events have no sequence numbers yet."""

    def continues(self, part: Part) -> bool: ...

    def opening(self) -> Iterable[Event]: ...

    def add(self, part: Part) -> Iterable[Event]: ...

    def close(self, status: str) -> Iterable[Event]:
        """The item's last events. Only the last item of the output is open."""
        ...

    def body(self) -> Json: ...


class _ContentItem:
    """An item whose content is texts: a message or a reasoning item."""

    def __init__(self, item_id: str, position: int) -> None:
        self._place = {"item_id": item_id, "output_index": position}
        self._content: list[_Content] = []
        self._status = "in_progress"

    def opening(self) -> Iterable[Event]:
        return [
            {"type": "response.output_item.added", "output_index": self._place["output_index"], "item": self.body()}
        ]

    def close(self, status: str) -> Iterable[Event]:
        self._status = status
        if self._content:
            yield from self._content[-1].close()
        yield {"type": "response.output_item.done", "output_index": self._place["output_index"], "item": self.body()}

    def body(self) -> Json:
        raise NotImplementedError

    def _extend(self, kind: str, text: str, logprobs: Iterable[Json] = ()) -> Iterator[Event]:
        if not self._content or self._content[-1].kind != kind:
            if self._content:
                yield from self._content[-1].close()
            self._content.append(_Content(kind, self._place, len(self._content)))
            yield from self._content[-1].opening()
        yield from self._content[-1].add(text, logprobs)


class MessageItem(_ContentItem):
    """A message of the model. `logprobs` says whether the client wants them."""

    def __init__(self, item_id: str, position: int, logprobs: bool) -> None:
        super().__init__(item_id, position)
        self._logprobs = logprobs

    def continues(self, part: Part) -> bool:
        return isinstance(part, Text | Refusal)

    def add(self, part: Part) -> Iterable[Event]:
        if isinstance(part, Text):
            return self._extend("output_text", part.text, part.logprobs if self._logprobs else ())
        assert isinstance(part, Refusal)
        return self._extend("refusal", part.text)

    def body(self) -> Json:
        return {
            "id": self._place["item_id"],
            "type": "message",
            "role": "assistant",
            "status": self._status,
            "content": [content.body() for content in self._content],
        }


class ReasoningItem(_ContentItem):
    """A thought, whole. If the client wants a summary, its events tell the thought as its own summary.

    `seal` makes `encrypted_content`; None: the client wants none, so that the ended item has the content too.
    """

    def __init__(self, item_id: str, position: int, *, as_summary: bool, seal: Seal | None) -> None:
        super().__init__(item_id, position)
        self._kind = "summary_text" if as_summary else "reasoning_text"
        self._seal = seal
        self._sealed: Json = {} if seal is None else {"encrypted_content": None}

    def continues(self, part: Part) -> bool:
        return isinstance(part, Reasoning)

    def add(self, part: Part) -> Iterable[Event]:
        assert isinstance(part, Reasoning)
        return self._extend(self._kind, part.text)

    def close(self, status: str) -> Iterable[Event]:
        if self._seal is not None:
            self._sealed = {"encrypted_content": self._seal("".join(content.text for content in self._content))}
        yield from super().close(status)

    def body(self) -> Json:
        texts = [content.body() for content in self._content]
        summary, content = (texts, list[Json]()) if self._kind == "summary_text" else ([], texts)
        if summary and self._seal is None and self._status != "in_progress":
            content = [{**text, "type": "reasoning_text"} for text in texts]
        head = {"id": self._place["item_id"], "type": "reasoning", "summary": summary, "content": content}
        return {**head, "status": self._status, **self._sealed}


class CallItem:
    """A call, which is complete when it is added. `fields` are those that only this type of call has."""

    def __init__(self, key: str, position: int, call_id: str, kind: ToolKind, fields: Json) -> None:
        self._position, self._kind, self._fields = position, kind, fields
        self._head: Json = {"id": f"{kind.prefix}_{key}_{position}", "type": kind.item, "call_id": call_id}
        self._status = "in_progress"

    def continues(self, part: Part) -> bool:  # noqa: ARG002
        """Never, since a call is added whole."""
        return False

    def opening(self) -> Iterable[Event]:
        """The events that announce the item, with an empty value for the field that a delta fills."""
        told = {} if self._kind.delta is None else {self._kind.delta[1]: ""}
        item = {**self.body(), **told}
        return [{"type": "response.output_item.added", "output_index": self._position, "item": item}]

    def add(self, part: Part) -> Iterable[Event]:  # noqa: ARG002
        return self.told()

    def told(self) -> Iterable[Event]:
        return self._told("delta", "delta")

    def close(self, status: str) -> Iterable[Event]:
        self._status = status
        done = {"type": "response.output_item.done", "output_index": self._position, "item": self.body()}
        named = {"name": self._fields["name"]} if self._kind is FUNCTION else {}
        return [*self._told("done", None, **named), done]

    def body(self) -> Json:
        return {**self._head, "status": self._status, **self._fields}

    def _told(self, what: str, key: str | None, **more: Any) -> list[Event]:
        if self._kind.delta is None:
            return []
        event, field = self._kind.delta
        place = {"item_id": self._head["id"], "output_index": self._position}
        return [{"type": f"response.{event}.{what}", **place, key or field: self._fields[field], **more}]


class _Content:
    """One text of an item's content or summary. `kind` is the type of its part.

    A summary's events have other names than those of `output_text`, `refusal` and `reasoning_text`.
    """

    def __init__(self, kind: str, place: Json, index: int) -> None:
        self.kind = kind
        is_summary = kind == "summary_text"
        self._place = {**place, "summary_index" if is_summary else "content_index": index}
        self._part = "reasoning_summary_part" if is_summary else "content_part"
        self._event = "reasoning_summary_text" if is_summary else kind
        self._key = "refusal" if kind == "refusal" else "text"
        self._texts: list[str] = []
        self._logprobs: list[Json] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def opening(self) -> Iterable[Event]:
        return [{"type": f"response.{self._part}.added", **self._place, "part": self.body()}]

    def add(self, text: str, logprobs: Iterable[Json]) -> Iterable[Event]:
        new = [_logprob(token) for token in logprobs]
        self._texts.append(text)
        self._logprobs += new
        more = {"logprobs": [_without_bytes(token) for token in new]} if self.kind == "output_text" else {}
        return [{"type": f"response.{self._event}.delta", **self._place, "delta": text, **more}]

    def close(self) -> Iterable[Event]:
        more: Json = {self._key: self.text}
        if self.kind == "output_text":
            more["logprobs"] = [_without_bytes(token) for token in self._logprobs]
        return [
            {"type": f"response.{self._event}.done", **self._place, **more},
            {"type": f"response.{self._part}.done", **self._place, "part": self.body()},
        ]

    def body(self) -> Json:
        body: Json = {"type": self.kind, self._key: self.text}
        if self.kind == "output_text":
            body |= {"annotations": [], "logprobs": list(self._logprobs)}
        return body


def _logprob(token: Mapping[str, Any]) -> Json:
    """A token's logprob with its alternatives, from chat completions."""
    others = token.get("top_logprobs")
    others = [other for other in others if isinstance(other, dict)] if isinstance(others, list) else []
    return {**_one_logprob(token), "top_logprobs": [_one_logprob(other) for other in others]}


def _one_logprob(token: Mapping[str, Any]) -> Json:
    text, logprob, given = token.get("token"), token.get("logprob"), token.get("bytes")
    text = text if isinstance(text, str) else ""
    return {
        "token": text,
        "bytes": given if given and isinstance(given, list) else list(text.encode()),
        "logprob": logprob if isinstance(logprob, int | float) else 0.0,
    }


def _without_bytes(token: Json) -> Json:
    """The form that events have."""
    top = [{key: other[key] for key in ("token", "logprob")} for other in token["top_logprobs"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": top}


SEALED_THOUGHTS: Final = "reasoning.encrypted_content"

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
    """Implements Turn. `fields` are the request's; the response repeats many of them. `seal` seals thoughts."""

    def __init__(self, fields: Mapping[str, Any], identity: Identity, seal: Seal | None = None) -> None:
        self._key = identity.key
        self._logprobs = wants_logprobs(fields)
        self._seal = seal if SEALED_THOUGHTS in (fields.get("include") or ()) else None
        self._fields = fields
        self._tools: ResponseTools | None = None  # until there is a call
        self._items: list[Item] = []
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
        return {**self._response, "output": [item.body() for item in self._items]}

    def begin(self, model: str, usage: Usage) -> Iterable[Event]:  # noqa: ARG002
        """`response.created` and `response.in_progress`, unless the client has had them."""
        if model:
            self._response["model"] = model
        return [] if self._number else [self._lifecycle("created"), self._lifecycle("in_progress")]

    def wait(self) -> Iterable[Event]:
        """OpenAI's own keep-alive event. The first event of a stream has to be `response.created`."""
        return self._numbered([{"type": "keepalive"}]) if self._number else self.begin("", Usage())

    def take(self, part: Part) -> Iterable[Event]:
        """The part's delta, in a new item if the part does not continue the last item."""
        item, events = self._item_for(part)
        return [*events, *self._numbered(item.add(part))]

    def end(self, finish_reason: str, stop: str | None, usage: Usage) -> Iterable[Event]:  # noqa: ARG002
        """The end of the last item, and `response.completed` or `response.incomplete`."""
        reason = INCOMPLETE.get(finish_reason)
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
            code = overflow_fields(f"{error.get('code')} {message}").get("code", "server_error")
            self._response |= {"status": "failed", "error": {"code": code, "message": message}}
            events.append(self._lifecycle("failed"))
        return [*events, response_error(error, self._next_number())]

    def _item_for(self, part: Part) -> tuple[Item, list[Event]]:
        if self._items and self._items[-1].continues(part):
            return self._items[-1], []
        item = self._new_item(part, len(self._items))
        return item, self._opened(item)

    def _opened(self, item: Item) -> list[Event]:
        events = self._close("completed")
        self._items.append(item)
        return [*events, *self._numbered(item.opening())]

    def _new_item(self, part: Part, position: int) -> Item:
        suffix = f"{self._key}_{position}"
        match part:
            case Reasoning():
                as_summary = bool((self._fields.get("reasoning") or {}).get("summary"))
                return ReasoningItem(f"rs_{suffix}", position, as_summary=as_summary, seal=self._seal)
            case Text() | Refusal():
                return MessageItem(f"msg_{suffix}", position, self._logprobs)
            case ToolCall():
                self._tools = self._tools or ResponseTools(self._fields)
                kind, fields = self._tools.item(part)
                return CallItem(self._key, position, part.call_id or f"call_{suffix}", kind, fields)

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


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
