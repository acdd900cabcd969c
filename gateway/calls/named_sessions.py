"""The sessions that clients name without knowing Plait, and where their last turns ran.

Coding agents and SDKs send a header or a field that stays the same for a conversation. The turns of one are treated as
one session: they take turns with other sessions while calls wait, and a prompt whose tokens are not known (one with
images) goes where the turn before it ran. Nothing else depends on it, so a wrong guess costs little.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from plait.backends.protocol.openai import Request
from plait.gateway.asgi import Headers

HEADERS: Final = frozenset((
    b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-id", b"x-opencode-session",
    b"x-session-affinity", b"conversation_id",
))  # fmt: skip
"""Of Claude Code, Codex (new and old), OpenCode, and what others have agreed on."""

MAX_CHARACTERS: Final = 256
"""Longer ones are no names."""

MOST_SESSIONS = 10_000


def known_session(headers: Headers, request: Request) -> str:
    """The session's name; empty if the request does not say. A header counts before a field, a user comes last."""
    for name, value in headers:
        if name in HEADERS and 0 < len(value) <= MAX_CHARACTERS:
            return value.decode("latin-1")
    for given in (request.prompt_cache_key, request.safety_identifier, request.user):
        if isinstance(given, str) and 0 < len(given) <= MAX_CHARACTERS:
            return given
    return ""


class SessionEngines:
    """The engine of each session's latest turn. The least recently used ones are forgotten beyond `most`."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._engines: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    def engine_of(self, tenant: str, session: str, model: str) -> str | None:
        """Where the session's latest turn ran; None for one that is not known."""
        return self._engines.get((tenant, session, model))

    def placed(self, tenant: str, session: str, model: str, engine_id: str) -> None:
        """A turn of the session runs on this engine."""
        key = tenant, session, model
        self._engines[key] = engine_id
        self._engines.move_to_end(key)
        if len(self._engines) > self._most:
            self._engines.popitem(last=False)
