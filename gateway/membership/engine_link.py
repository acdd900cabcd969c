"""The way to reach an engine: its connections, its API key, and the headers that pass."""

from __future__ import annotations

from dataclasses import dataclass

from plait.backends.http.client import HttpClient
from plait.gateway.membership.passed_headers import BY_DEFAULT, PassedHeaders

TOO_EARLY = frozenset((408, 425, 429))
"""Statuses below 500 that are not the caller's fault."""

NO_ACCESS = frozenset((401, 403))
"""Statuses that are the gateway's fault if it sent its own key."""


@dataclass(frozen=True, slots=True)
class EngineLink:
    """`authorization` is the value of the header that the engine gets; None if it has no key of its own."""

    client: HttpClient
    authorization: bytes | None = None
    passed: PassedHeaders = BY_DEFAULT

    def refused_ours(self, status: int) -> bool:
        """Whether an answer with this status refuses the gateway's own key."""
        return status in NO_ACCESS and self.authorization is not None
