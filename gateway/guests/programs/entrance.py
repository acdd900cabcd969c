"""The entrance of programs into their sessions: one program of a tenant at a time."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from plait.gateway.intake.turns import LoopTurns, Pieces

T = TypeVar("T")


class Entrance:
    """Serializes the programs of a tenant while they enter, so that each still has the room that its check found.

    Other requests for the session wait until the program is whole (`whole`).
    """

    def __init__(self, turns: LoopTurns) -> None:
        self._loop_turns = turns
        self._locks: dict[str, asyncio.Lock] = {}  # by tenant
        self._sessions: dict[str, str] = {}  # by tenant: the session that a program is entering

    async def run(self, tenant: str, session_id: str, work: Pieces[T]) -> T:
        """Do the work of entering a session, one program of a tenant at a time. Returns its result."""
        async with self._locks.setdefault(tenant, asyncio.Lock()):
            self._sessions[tenant] = session_id
            try:
                return await self._loop_turns.run(tenant, work)
            finally:
                del self._sessions[tenant]

    async def whole(self, tenant: str, session_id: str | None) -> None:
        """Wait while a program enters the session."""
        if self._sessions and session_id is not None and self._sessions.get(tenant) == session_id:
            async with self._locks[tenant]:
                pass
