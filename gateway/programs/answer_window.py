"""The messages of a recorded answer that are held, and how far each client has read them.

Synchronous. `recorded_answer` is its asyncio shell.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from starlette.types import Message

MESSAGE_BYTES = 512
"""What a message takes besides its body: a dictionary and a bytes object."""


class Ledger(Protocol):
    """Where the bytes of a recording count (`answer_bytes`)."""

    def keep(self, size_bytes: int) -> bool:
        """Whether this much more may be kept for a repeated request. If so, it counts."""

    def hold(self, size_bytes: int) -> None:
        """Count this much more. Raises `PlaitError` beyond the limit."""

    def free(self, size_bytes: int) -> None:
        """Count this much less."""


class Follower:
    """A client's place: the messages and bytes that it has been sent."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages = 0
        self.size_bytes = 0


class AnswerWindow:
    """Messages from one writer to `followers`.

    With `keeps`, all of them are held, as long as `ledger` allows it. Otherwise only those that a follower has not been
    sent yet. `held_bytes` counts them.
    """

    __slots__ = ("_first", "_ledger", "_messages", "_written_bytes", "followers", "held_bytes", "keeps")

    def __init__(self, ledger: Ledger, *, keeps: bool) -> None:
        self.keeps = keeps
        self.held_bytes = 0
        self.followers: dict[Follower, None] = {}
        self._ledger = ledger
        self._messages: deque[Message] = deque()
        self._first = 0  # the number of the first message that is held
        self._written_bytes = 0

    @property
    def lag_bytes(self) -> int:
        """How far the slowest follower is behind."""
        written = self._written_bytes
        return written - min([follower.size_bytes for follower in self.followers], default=written)

    def next(self, follower: Follower) -> Message | None:
        """The next message for a follower; None if it has not come yet."""
        place = follower.messages - self._first
        return self._messages[place] if place < len(self._messages) else None

    def write(self, message: Message) -> None:
        """A message comes. Raises the ledger's `PlaitError` if it cannot be held for the followers."""
        size_bytes = _size_bytes(message)
        if self.keeps and not self._ledger.keep(size_bytes):
            self.drop()
        if not self.keeps and self.followers:
            self._ledger.hold(size_bytes)
        self._written_bytes += size_bytes
        if self.keeps or self.followers:
            self.held_bytes += size_bytes
            self._messages.append(message)
        else:
            self._first += 1

    def was_sent(self, follower: Follower, message: Message) -> None:
        """A follower has been sent its next message."""
        follower.messages += 1
        follower.size_bytes += _size_bytes(message)
        self._trim()

    def leave(self, follower: Follower) -> None:
        """A follower has all, or has gone."""
        del self.followers[follower]
        self._trim()

    def drop(self) -> None:
        """Keep the messages no longer than followers need them."""
        self.keeps = False
        self._trim()

    def clear(self) -> None:
        """Begin again. No follower may have been sent anything."""
        self._messages.clear()
        self._free(self.held_bytes)
        self._first = self._written_bytes = 0

    def _trim(self) -> None:
        """Forget the messages that every follower has been sent, unless they are kept."""
        if self.keeps:
            return
        end = self._first + len(self._messages)
        for _ in range(min((follower.messages for follower in self.followers), default=end) - self._first):
            self._free(_size_bytes(self._messages.popleft()))
            self._first += 1

    def _free(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._ledger.free(size_bytes)


def _size_bytes(message: Message) -> int:
    return MESSAGE_BYTES + len(message.get("body", b""))
