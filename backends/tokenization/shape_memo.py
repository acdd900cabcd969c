"""The shapes of a tokenizer's chats, found by all of a request that is no content (`template_shapes`)."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from plait.backends.tokenization.chat_messages import BILLING_LINE
from plait.backends.tokenization.template_shapes import Shape, record

MOST_BYTES: Final = 2 * 2**20
"""Of a tokenizer's shapes. One with 8 tools takes some 15 KB."""

MOST_MESSAGES: Final = 256
MOST_TOOLS_BYTES: Final = 64 * 1024

MOST_WAYS: Final = 4
"""Through a template for chats of one kind. Contents that take others are rendered by Jinja."""

_ENTRY_BYTES: Final = 500
_SEEN: Final = 1_024
_ROLES: Final = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class PlainChat:
    """A chat whose messages have a role and a text, as its `contents` and the `kind` that it has without them."""

    kind: Hashable
    contents: Sequence[str]


@dataclass(slots=True)
class _Ways:
    shapes: list[Shape] = field(default_factory=list)
    recorded: int = 0
    size_bytes: int = 0


def plain_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    salt: Hashable,
    *,
    add_generation_prompt: bool,
) -> PlainChat | None:
    """The chat, as it came; None if it has more in its messages. Tools and options are known to one `salt` only."""
    contents: list[str] = []
    roles: list[str] = []
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES or type(content) is not str or content.startswith(BILLING_LINE):
            return None
        roles.append(role)
        contents.append(content)
    if not 0 < len(roles) <= MOST_MESSAGES:
        return None
    if tools is None and not options:
        return PlainChat((add_generation_prompt, *roles), contents)
    try:
        said = msgspec.json.encode((tools, options))  # equal bytes: the same keys in the same order, and the same kinds
    except (TypeError, ValueError, OverflowError):
        return None
    return PlainChat((add_generation_prompt, salt, said, *roles), contents) if len(said) <= MOST_TOOLS_BYTES else None


class ShapeMemo:
    """Shapes in MOST_BYTES of memory, the least recently used kind forgotten first; safe to call from many threads.

    A chat's shape is recorded when its kind comes for the second time.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kinds: OrderedDict[Hashable, _Ways] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"ShapeMemo({len(self._kinds)} kinds, {self.held_bytes} of {self._most_bytes} bytes)"

    def render(self, chat: PlainChat) -> str | None:
        """The chat's text; None if Jinja has to render it."""
        ways = self._kinds.get(chat.kind)
        if ways is None:
            return None
        for shape in ways.shapes:
            text = shape.render(chat.contents)
            if text is not None:
                return text
        return None

    def learn(
        self,
        chat: PlainChat,
        template: str,
        prepared: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        text: str,
    ) -> None:
        """Jinja has rendered the chat, of these messages and variables, as `text`."""
        if not self._may_record(chat.kind):
            return
        shape = record(template, prepared, chat.contents, variables)
        if shape is not None and shape.render(chat.contents) == text:
            self._keep(chat.kind, shape)

    def _may_record(self, kind: Hashable) -> bool:
        """Whether a kind has come before, and has ways left. Its way then counts."""
        with self._lock:
            ways = self._kinds.get(kind)
            if ways is None:
                seen = hash(kind)
                if seen not in self._seen:
                    self._seen[seen] = None
                    if len(self._seen) > _SEEN:
                        self._seen.popitem(last=False)
                    return False
                ways = self._kinds[kind] = _Ways()
                self._add(ways, _ENTRY_BYTES + sum(map(sys.getsizeof, kind)))  # type: ignore[call-overload]
            else:
                self._kinds.move_to_end(kind)
            ways.recorded += 1
            return ways.recorded <= MOST_WAYS

    def _keep(self, kind: Hashable, shape: Shape) -> None:
        with self._lock:
            ways = self._kinds.get(kind)
            if ways is not None:
                ways.shapes.append(shape)
                self._add(ways, shape.size_bytes)

    def _add(self, ways: _Ways, size_bytes: int) -> None:
        ways.size_bytes += size_bytes
        self.held_bytes += size_bytes
        while self.held_bytes > self._most_bytes:
            _, forgotten = self._kinds.popitem(last=False)
            self.held_bytes -= forgotten.size_bytes
