"""Reads the text of a completion from an engine's answer, which goes to the client at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from plait.backends.protocol.message_content import content_text


class _Text(msgspec.Struct, frozen=True):
    content: Any = None


class _Choice(msgspec.Struct, frozen=True):
    text: Any = None
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: Any = None


class _Body(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


_DECODER = msgspec.json.Decoder(_Body)


class TextTap(msgspec.Struct, eq=False):
    """Reads one answer with one choice."""

    on_text: Callable[[str], None]
    """Gets the text as it comes, joined for all events of one `feed`."""
    space: str = ""
    """A space or nothing, which is removed from the beginning of the text."""
    was_cut: bool = False
    """Whether the text ended at the output limit."""
    is_found: bool = False
    """Whether the answer has a text, which may be empty."""
    is_unreadable: bool = False

    @property
    def problem(self) -> str | None:
        """Why the ended answer has no usable text; None if it has one."""
        if self.is_unreadable:
            return "its answer is not a completion"
        return None if self.is_found else "its answer has no text"

    def feed(self, events: bytes) -> None:
        texts = []
        for line in events.splitlines():
            data = line.removeprefix(b"data:").strip()
            if data and len(data) < len(line) and data != b"[DONE]":
                texts.append(self._read(data))
        self._tell("".join(texts))

    def whole(self, body: bytes | bytearray) -> None:
        self._tell(self._read(body))

    def _tell(self, text: str) -> None:
        if not text:
            return
        text, self.space = text.removeprefix(self.space), ""
        if text:
            self.on_text(text)

    def _read(self, body: bytes | bytearray) -> str:
        try:
            decoded = _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.is_unreadable = True
            return ""
        if not decoded.choices:
            return ""
        choice = decoded.choices[0]
        self.was_cut |= choice.finish_reason == "length"
        part = choice.delta or choice.message
        text = choice.text if part is None else part.content
        if text is None:
            return ""
        self.is_found = True
        return text if isinstance(text, str) else content_text(text)
