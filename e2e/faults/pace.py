"""How fast a scripted engine answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Seconds until the first byte of an answer, and between two tokens."""

    first_s: float = 0.0
    token_s: float = 0.0
