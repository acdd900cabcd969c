"""A text that is generated piece by piece. Its readers share it, each from a place of its own."""

from __future__ import annotations

PIECES_PER_BLOCK = 1024
"""So many pieces are joined into one. A short string takes about 50 bytes more than its text."""


class GrowingText:
    """A text that only grows. `characters` and `size_bytes` (of UTF-8) are its length so far."""

    __slots__ = ("_blocks", "_pieces", "characters", "size_bytes")

    def __init__(self) -> None:
        self.characters = 0
        self.size_bytes = 0
        self._blocks: list[str] = []
        self._pieces: list[str] = []

    def add(self, text: str) -> int:
        """Append a piece; returns its bytes."""
        size_bytes = utf8_bytes(text)
        self.characters += len(text)
        self.size_bytes += size_bytes
        self._pieces.append(text)
        if len(self._pieces) == PIECES_PER_BLOCK:
            self._blocks.append("".join(self._pieces))
            self._pieces.clear()
        return size_bytes

    def since(self, start: int) -> str:
        """The text from character `start` on. It costs as much as there are pieces from there on."""
        found, begins = list[str](), self.characters
        for parts in (self._pieces, self._blocks):
            for part in reversed(parts):
                if begins <= start:
                    break
                found.append(part)
                begins -= len(part)
        text = "".join(reversed(found))
        return text[start - begins :] if begins < start else text

    def __str__(self) -> str:
        return "".join([*self._blocks, *self._pieces])


def utf8_bytes(text: str) -> int:
    """A text's length in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
