"""Remembers the engines of conversations with prompts that the gateway cannot tokenize (images).

Without tokens there are no block hashes, by which placement would find the engine that has the conversation cached.
"""

from __future__ import annotations

from collections import OrderedDict

from plait.gateway.calls.call import Asked

MOST_SESSIONS = 10_000
"""The most sessions that are remembered."""


class SessionEngines:
    """The engine of each named session's latest turn: an LRU map of at most `most` sessions."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._engines: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    def engine_of(self, tenant: str, session: str, model: str) -> str | None:
        return self._engines.get((tenant, session, model))

    def preferred(self, asked: Asked) -> str | None:
        """The engine with a call's context: `continues_on`, or without tokens that of the session's latest turn. A line
        of a batch has the engine of its part.

        None if no such engine is known.
        """
        if asked.slot.continues_on is None and asked.turn_of and not asked.call.prompt_tokens:
            return self.engine_of(asked.tenant, asked.turn_of, asked.call.model)
        return asked.slot.continues_on or asked.prefer

    def placed(self, tenant: str, session: str, model: str, engine_id: str) -> None:
        key = tenant, session, model
        self._engines[key] = engine_id
        self._engines.move_to_end(key)
        if len(self._engines) > self._most:
            self._engines.popitem(last=False)
