"""Anthropic's Messages API (`POST /v1/messages`, `POST /v1/messages/count_tokens`) over chat completions.

An assistant's turn is a `message` object and the events of its growth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from plait.backends.protocol.api_errors import Event, as_message_error, message_error
from plait.backends.protocol.context_overflow import is_overflow, overflow_error
from plait.backends.translation.answer_translator import Identity, Part
from plait.backends.translation.chat_answer import Reasoning, Usage
from plait.backends.translation.fields import Json, Seal
from plait.backends.translation.tool_calls import ToolCall

# OpenAI's finish reason -> Anthropic's stop reason; the other ones do not say whether there is a call to run
_STOP_REASONS: Final = {"length": "max_tokens", "content_filter": "refusal"}

# Anthropic's types of error that engines name as Anthropic does, and those of vLLM's types
_ERROR_TYPES: Final = {
    "BadRequestError": "invalid_request_error",
    "NotFoundError": "not_found_error",
    **{
        kind: kind
        for kind in (
            "invalid_request_error",
            "authentication_error",
            "permission_error",
            "not_found_error",
            "rate_limit_error",
            "overloaded_error",
        )
    },
}


class MessageTurn:
    """Implements Turn. `fields` are the request's. `seal` makes the signatures of thoughts, which are empty without."""

    def __init__(self, fields: Mapping[str, Any], identity: Identity, seal: Seal | None = None) -> None:
        self._key = identity.key
        self._seal = seal
        self._stop_sequences = frozenset(fields.get("stop_sequences") or ())
        self._blocks: list[_Block] = []
        self._message: Json = {
            "id": f"msg_{identity.key}",
            "type": "message",
            "role": "assistant",
            "model": fields.get("model") or "",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage()),
        }

    def answer(self) -> Json:
        return {**self._message, "content": [block.body() for block in self._blocks]}

    def begin(self, model: str, usage: Usage) -> Iterable[Event]:
        """`message_start`, with the usage known so far."""
        if model:
            self._message["model"] = model
        self._message["usage"] = _usage(usage)
        return [{"type": "message_start", "message": self.answer()}]

    def wait(self) -> Iterable[Event]:
        """Anthropic's own keep-alive event, which may come before `message_start`."""
        return [{"type": "ping"}]

    def take(self, part: Part) -> Iterable[Event]:
        """The part's delta, in a new block if the part does not continue the last block."""
        block, events = self._block_for(part)
        text = block.add(part)
        if text:
            delta = {"type": block.delta, block.delta_key: text}
            events.append({"type": "content_block_delta", "index": block.index, "delta": delta})
        return events

    def end(self, finish_reason: str, stop: str | None, usage: Usage) -> Iterable[Event]:
        """The end of the last block, `message_delta` with the reason and the usage, and `message_stop`."""
        events = self._close()
        reason = {"stop_reason": self._stop_reason(finish_reason, stop), "stop_sequence": None}
        if reason["stop_reason"] == "stop_sequence":
            reason["stop_sequence"] = stop
        self._message |= {**reason, "usage": _usage(usage)}
        changed = {"type": "message_delta", "delta": reason, "usage": self._message["usage"]}
        return [*events, changed, {"type": "message_stop"}]

    def fail(self, error: Mapping[str, Any]) -> Iterable[Event]:
        message = str(error.get("message") or "The engine has failed.")
        if is_overflow(f"{error.get('code')} {message}"):
            return [as_message_error(overflow_error(message))]
        return [message_error(_ERROR_TYPES.get(str(error.get("type")), "api_error"), message)]

    def _stop_reason(self, finish_reason: str, stop: str | None) -> str:
        if finish_reason in _STOP_REASONS:
            return _STOP_REASONS[finish_reason]
        if stop in self._stop_sequences:
            return "stop_sequence"
        return "tool_use" if any(isinstance(block, _ToolUse) for block in self._blocks) else "end_turn"

    def _block_for(self, part: Part) -> tuple[_Block, list[Event]]:
        if self._blocks and self._blocks[-1].continues(part):
            return self._blocks[-1], []
        events = self._close()
        block = self._new_block(part, len(self._blocks))
        self._blocks.append(block)
        return block, [*events, {"type": "content_block_start", "index": block.index, "content_block": block.body()}]

    def _new_block(self, part: Part, index: int) -> _Block:
        if isinstance(part, ToolCall):
            return _ToolUse(index, part.call_id or f"toolu_{self._key}_{index}", part.name)
        return _Thinking(index, self._seal) if isinstance(part, Reasoning) else _Text(index)

    def _close(self) -> list[Event]:
        if not self._blocks:
            return []
        last = self._blocks[-1]
        deltas = [{"type": "content_block_delta", "index": last.index, "delta": delta} for delta in last.close()]
        return [*deltas, {"type": "content_block_stop", "index": last.index}]


class _Block(ABC):
    """A content block. `delta` is the type of its deltas, `delta_key` the key of the text in them."""

    delta: ClassVar[str]
    delta_key: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.index = index

    @abstractmethod
    def continues(self, part: Part) -> bool:
        """Whether a part belongs to this block, which is the last one."""

    @abstractmethod
    def add(self, part: Part) -> str:
        """Add a part; returns the text of its delta."""

    def close(self) -> Iterable[Json]:
        """The deltas of a block that has ended."""
        return ()

    @abstractmethod
    def body(self) -> Json:
        """The block as it is now."""


class _TextBlock(_Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._texts: list[str] = []

    def add(self, part: Part) -> str:
        assert not isinstance(part, ToolCall)
        self._texts.append(part.text)
        return part.text


class _Text(_TextBlock):
    delta, delta_key = "text_delta", "text"

    def continues(self, part: Part) -> bool:
        return not isinstance(part, Reasoning | ToolCall)

    def body(self) -> Json:
        return {"type": "text", "text": "".join(self._texts)}


class _Thinking(_TextBlock):
    """A thought. Most clients keep one for the next request only if it has a signature."""

    delta, delta_key = "thinking_delta", "thinking"

    def __init__(self, index: int, seal: Seal | None) -> None:
        super().__init__(index)
        self._seal = seal
        self._signature = ""

    def continues(self, part: Part) -> bool:
        return isinstance(part, Reasoning)

    def close(self) -> Iterable[Json]:
        if self._seal is None:
            return ()
        self._signature = self._seal("".join(self._texts))
        return [{"type": "signature_delta", "signature": self._signature}]

    def body(self) -> Json:
        return {"type": "thinking", "thinking": "".join(self._texts), "signature": self._signature}


class _ToolUse(_Block):
    """A call. Arguments that are cut off or not an object become an empty object."""

    delta, delta_key = "input_json_delta", "partial_json"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._call: Json = {"type": "tool_use", "id": call_id, "name": name, "input": {}}

    def continues(self, part: Part) -> bool:  # noqa: ARG002
        return False

    def add(self, part: Part) -> str:
        assert isinstance(part, ToolCall)
        values = part.values
        self._call["input"] = values or {}
        return "" if values is None else part.json.decode()

    def body(self) -> Json:
        return dict(self._call)


def _usage(usage: Usage) -> Json:
    """Anthropic's counts, whose input tokens leave out the cached ones."""
    counts: Json = {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
    if usage.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts
