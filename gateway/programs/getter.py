"""Somebody who waits for a semantic variable (Parrot's get)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.backends.errors import PlaitError
from plait.policy.programs.objectives_marks import Mark
from plait.policy.types import Slo


@dataclass(slots=True, eq=False)
class Getter:
    """One wait for one variable: `mark` is what the caller asks for (None: nothing).

    One of `on_value` and `on_failed` is called, once, unless the getter is released before; `on_delta` is given the
    text as it is generated, if that is the value, and None where all of it is void and comes anew. `since_s` is when
    the job began that an end-to-end time counts from.
    """

    variable: str
    on_value: Callable[[str], None]
    on_failed: Callable[[PlaitError], None]
    mark: Mark | None = None
    on_delta: Callable[[str | None], None] | None = None
    since_s: float | None = None

    @property
    def jct_s(self) -> float | None:
        """The end-to-end time that was asked for, in seconds."""
        return self.mark.jct_s if isinstance(self.mark, Slo) else None

    def left_s(self, now_s: float) -> float | None:
        """What is left of it, in seconds; all of it before the job has begun."""
        jct_s = self.jct_s
        return jct_s if jct_s is None or self.since_s is None else jct_s - (now_s - self.since_s)
