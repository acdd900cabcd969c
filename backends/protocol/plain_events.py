"""Events of a stream that differ in their texts only: nearly all of a completion's stream, read without decoding."""

from __future__ import annotations

import re
from typing import Final

LOOKS: Final = 8
"""So many events of a stream are tried as examples. A thought and an answer need one each."""

_PLAIN: Final = re.compile(
    rb'\A(data: \{[^\n]*?"(?:content|text|reasoning|reasoning_content)":")([^"\\\n]*)("[^\n]*\}\n\n)\Z'
)
"""An event with a text that has nothing escaped: what is before the text, the text, and what is behind it."""

_KEY: Final = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":"')


class PlainEvents:
    """Knows an event of a stream, the example, by what is before and behind its text.

    `looks` is how many more events may be tried as examples.
    """

    __slots__ = ("_head", "_rest", "looks")

    def __init__(self, looks: int = LOOKS) -> None:
        self.looks = looks
        self._head = self._rest = b""

    def learn(self, event: bytes, text: str | None = None) -> bool:
        """Take this event as the example. False, and the example stays, if it has no plain text, or not only `text`."""
        found = _PLAIN.match(event)
        if found is not None and _KEY.search(found[3]) is not None:
            return False  # engines that tell a thought under two names: a look at an answer is still needed
        self.looks -= 1
        if found is None or (text is not None and found[2] != text.encode()):
            return False
        self._head, self._rest = found[1], found[3]
        return True

    def text(self, event: bytes) -> str | None:
        """The text of an event that differs from the example in its text only; None for any other bytes."""
        head, rest = self._head, self._rest
        if not (head and event.startswith(head) and event.endswith(rest)):
            return None
        text = event[len(head) : len(event) - len(rest)]
        if text.find(b'"') >= 0 or text.find(b"\\") >= 0:
            return None
        try:
            return text.decode()
        except UnicodeDecodeError:  # or half of a pair, whose other half may follow
            return None
