"""Where the turns of sessions run, for calls whose prompt does not tell."""

from __future__ import annotations

from collections import OrderedDict

from plait.gateway.calls.call import Asked

MOST_SESSIONS = 10_000
"""The most sessions that are remembered."""


class SessionEngines:
    """The engine of each named session's latest turn. The least recently used ones are forgotten beyond `most`."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._engines: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    def engine_of(self, tenant: str, session: str, model: str) -> str | None:
        """Where the session's latest turn ran; None for one that is not known."""
        return self._engines.get((tenant, session, model))

    def preferred(self, asked: Asked) -> str | None:
        """The engine that has what a call continues, if its prompt does not tell."""
        if asked.continues_on is None and asked.turn_of and not asked.call.prompt_tokens:
            return self.engine_of(asked.tenant, asked.turn_of, asked.call.model)
        return asked.continues_on

    def placed(self, tenant: str, session: str, model: str, engine_id: str) -> None:
        key = tenant, session, model
        self._engines[key] = engine_id
        self._engines.move_to_end(key)
        if len(self._engines) > self._most:
            self._engines.popitem(last=False)
