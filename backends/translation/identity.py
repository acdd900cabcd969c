"""The id and the time of an answer."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """`key` makes the ids of an answer and of its parts. `created_s` is the Unix time."""

    key: str
    created_s: int


def new_identity() -> Identity:
    """A key that no other answer has, and the present. It is the only place of this room that is not pure."""
    return Identity(uuid.uuid4().hex, int(time.time()))
