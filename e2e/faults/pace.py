"""How fast a scripted engine answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Seconds until the first byte of an answer, and between two tokens."""

    first_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True)
class Silence:
    """Seconds for which an engine holds a stream back: before its first event, and in its middle.

    A call has them in its body, under `silence`. The gateway's trials have none.
    """

    first_s: float = 0.0
    middle_s: float = 0.0
