"""Where the turns of sessions ran whose prompts have no tokens that the gateway knows, such as those with images."""

from __future__ import annotations

from collections import OrderedDict

MOST_SESSIONS = 10_000


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
