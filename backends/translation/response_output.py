"""The items of a response's output: what the model thought, said and called. Each grows and tells of it in events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from plait.backends.translation.chat_answer import Part, Reasoning, Refusal, Text, ToolCall
from plait.backends.translation.events import Event
from plait.backends.translation.fields import Json


class Item(Protocol):
    """An item of the output. The events have no sequence numbers yet."""

    def continues(self, part: Part) -> bool:
        """Whether the part belongs to this item."""
        ...

    def opening(self) -> Iterable[Event]:
        """The events that announce the item."""
        ...

    def add(self, part: Part) -> Iterable[Event]:
        """Add a part that `continues`."""
        ...

    def close(self, status: str) -> Iterable[Event]:
        """The item's last events. Only the last item of the output is open."""
        ...

    def body(self) -> Json:
        """The item as JSON."""
        ...


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
            self._content.append(_Content(kind, {**self._place, "content_index": len(self._content)}))
            yield from self._content[-1].opening()
        yield from self._content[-1].add(text, logprobs)


class MessageItem(_ContentItem):
    """What the model said. `logprobs` says whether the client wants them."""

    def __init__(self, item_id: str, position: int, logprobs: bool) -> None:
        super().__init__(item_id, position)
        self._logprobs = logprobs

    def continues(self, part: Part) -> bool:
        """Whether the part is text or a refusal."""
        return isinstance(part, Text | Refusal)

    def add(self, part: Part) -> Iterable[Event]:
        """A delta."""
        if isinstance(part, Text):
            return self._extend("output_text", part.text, part.logprobs if self._logprobs else ())
        assert isinstance(part, Refusal)
        return self._extend("refusal", part.text)

    def body(self) -> Json:
        """A `message`."""
        return {
            "id": self._place["item_id"],
            "type": "message",
            "role": "assistant",
            "status": self._status,
            "content": [content.body() for content in self._content],
        }


class ReasoningItem(_ContentItem):
    """What the model thought."""

    def continues(self, part: Part) -> bool:
        """Whether the part is reasoning."""
        return isinstance(part, Reasoning)

    def add(self, part: Part) -> Iterable[Event]:
        """A delta."""
        assert isinstance(part, Reasoning)
        return self._extend("reasoning_text", part.text)

    def body(self) -> Json:
        """A `reasoning` item."""
        return {
            "id": self._place["item_id"],
            "type": "reasoning",
            "summary": [],
            "content": [content.body() for content in self._content],
            "status": self._status,
        }


class CallItem:
    """A call to a function. A part of the call may come after another item has begun; the item is then closed."""

    def __init__(self, item_id: str, position: int, call_id: str, name: str) -> None:
        self._item_id, self._position = item_id, position
        self._call_id, self._name = call_id, name
        self._arguments = ""
        self._status = "in_progress"

    def continues(self, part: Part) -> bool:
        """False for another call: some engines give every call the index 0, but each a new id."""
        return isinstance(part, ToolCall) and (not part.name or part.call_id in (None, self._call_id))

    def opening(self) -> Iterable[Event]:
        """The events that announce the item."""
        return [{"type": "response.output_item.added", "output_index": self._position, "item": self.body()}]

    def add(self, part: Part) -> Iterable[Event]:
        """A delta of the arguments; no events for an empty one."""
        assert isinstance(part, ToolCall)
        self._arguments += part.arguments
        return [self._event("delta", {"delta": part.arguments})] if part.arguments else []

    def close(self, status: str) -> Iterable[Event]:
        """The item's last events."""
        self._status = status
        return [
            self._event("done", {"arguments": self._arguments, "name": self._name}),
            {"type": "response.output_item.done", "output_index": self._position, "item": self.body()},
        ]

    def body(self) -> Json:
        """A `function_call`."""
        return {
            "id": self._item_id,
            "type": "function_call",
            "status": self._status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
        }

    def _event(self, what: str, more: Mapping[str, Any]) -> Event:
        kind = f"response.function_call_arguments.{what}"
        return {"type": kind, "item_id": self._item_id, "output_index": self._position, **more}


class _Content:
    """One text of an item's content. `kind` is its type: `output_text`, `refusal` or `reasoning_text`."""

    def __init__(self, kind: str, place: Json) -> None:
        self.kind = kind
        self._place = place
        self._key = "refusal" if kind == "refusal" else "text"
        self._texts: list[str] = []
        self._logprobs: list[Json] = []

    def opening(self) -> Iterable[Event]:
        return [{"type": "response.content_part.added", **self._place, "part": self.body()}]

    def add(self, text: str, logprobs: Iterable[Json]) -> Iterable[Event]:
        new = [_logprob(token) for token in logprobs]
        self._texts.append(text)
        self._logprobs += new
        more = {"logprobs": [_without_bytes(token) for token in new]} if self.kind == "output_text" else {}
        return [{"type": f"response.{self.kind}.delta", **self._place, "delta": text, **more}]

    def close(self) -> Iterable[Event]:
        more: Json = {self._key: "".join(self._texts)}
        if self.kind == "output_text":
            more["logprobs"] = [_without_bytes(token) for token in self._logprobs]
        return [
            {"type": f"response.{self.kind}.done", **self._place, **more},
            {"type": "response.content_part.done", **self._place, "part": self.body()},
        ]

    def body(self) -> Json:
        body: Json = {"type": self.kind, self._key: "".join(self._texts)}
        if self.kind == "output_text":
            body |= {"annotations": [], "logprobs": list(self._logprobs)}
        return body


def _logprob(token: Mapping[str, Any]) -> Json:
    """A token's logprob with its alternatives, from chat completions."""
    return {**_one_logprob(token), "top_logprobs": [_one_logprob(other) for other in token.get("top_logprobs") or ()]}


def _one_logprob(token: Mapping[str, Any]) -> Json:
    text = token.get("token", "")
    return {"token": text, "bytes": token.get("bytes") or list(text.encode()), "logprob": token.get("logprob", 0.0)}


def _without_bytes(token: Json) -> Json:
    """The form that events have."""
    top = [{key: other[key] for key in ("token", "logprob")} for other in token["top_logprobs"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": top}
