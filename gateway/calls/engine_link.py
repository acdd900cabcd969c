"""The way to reach an engine: its connections, its API key, and the headers that pass."""

from __future__ import annotations

from dataclasses import dataclass

from plait.backends.http.client import HttpClient
from plait.gateway.calls.passed_headers import BY_DEFAULT, PassedHeaders


@dataclass(frozen=True, slots=True)
class EngineLink:
    """`authorization` is the value of the header that the engine gets; None if it has no key of its own."""

    client: HttpClient
    authorization: bytes | None = None
    passed: PassedHeaders = BY_DEFAULT
