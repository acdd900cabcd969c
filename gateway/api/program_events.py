"""The events of a program's stream: texts as they grow, values, failures, and the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from plait.gateway.api.awaited_variable import AwaitedVariable
from plait.gateway.programs.session import Session


class ProgramEvents:
    """What a stream still has to say of the variables that it waits for, as server-sent events."""

    def __init__(self, session: Session, awaited: Sequence[AwaitedVariable]) -> None:
        self._session = session
        self._open = list(awaited)

    @property
    def is_over(self) -> bool:
        """Whether the value or the failure of each variable has been told."""
        return not self._open

    def news(self) -> bytes:
        """All events since the last call. Texts of several pieces are one delta."""
        news = b"".join(event for awaited in self._open for event in self._of(awaited))
        self._open = [awaited for awaited in self._open if not awaited.is_answered]
        return news

    def _of(self, awaited: AwaitedVariable) -> Iterator[bytes]:
        name, text = awaited.name, awaited.news()
        if text:
            yield event("delta", {"name": name, "delta": text})
        if awaited.error is not None:
            yield event("failed", {"name": name, "error": awaited.error.error_object})
        elif awaited.value is not None:
            value = {"name": name, "value": awaited.value, "truncated": self._session.was_cut(name)}
            yield event("value", value)


def event(kind: str, data: object) -> bytes:
    """A server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
