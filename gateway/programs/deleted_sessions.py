"""The ids of deleted sessions. They are refused for a while, so that a late call does not begin the session anew."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from plait.backends.errors import SessionEndedError


@dataclass(slots=True)
class _Ids:
    """One tenant's: until when each id is refused, and the same as a heap."""

    until_s: dict[str, float] = field(default_factory=dict)
    heap: list[tuple[float, str]] = field(default_factory=list)


class DeletedSessions:
    """Refuses ids by tenant, at most `limit` of each tenant. Beyond it the one that ends first is forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tenants: dict[str, _Ids] = {}

    def add(self, tenant: str, session_id: str, now_s: float, until_s: float) -> None:
        """Refuse an id until then. It is not refused now."""
        self._forget(tenant, now_s)
        ids = self._tenants.setdefault(tenant, _Ids())
        ids.until_s[session_id] = until_s
        heapq.heappush(ids.heap, (until_s, session_id))
        if len(ids.heap) > self._limit:
            del ids.until_s[heapq.heappop(ids.heap)[1]]

    def check(self, tenant: str, session_id: str, now_s: float) -> None:
        """Raise `SessionEndedError` if the id is refused."""
        ids = self._tenants.get(tenant)
        if ids is not None and ids.until_s.get(session_id, now_s) > now_s:
            message = f"The session '{session_id}' was deleted. Make a new session, under another id."
            raise SessionEndedError(message, param="session_id")

    def expire(self, now_s: float) -> None:
        """Forget the ids that are not refused any more."""
        for tenant in list(self._tenants):
            self._forget(tenant, now_s)

    def __len__(self) -> int:
        return sum(len(ids.heap) for ids in self._tenants.values())

    def _forget(self, tenant: str, now_s: float) -> None:
        ids = self._tenants.get(tenant)
        while ids is not None and ids.heap and ids.heap[0][0] <= now_s:
            del ids.until_s[heapq.heappop(ids.heap)[1]]
        if ids is not None and not ids.heap:
            del self._tenants[tenant]

    def check_books(self) -> None:
        """Assert the invariants; for tests."""
        for ids in self._tenants.values():
            assert 0 < len(ids.heap) <= self._limit
            assert {session_id: until_s for until_s, session_id in ids.heap} == ids.until_s
