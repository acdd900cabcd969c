"""A getter: one client's wait for a semantic variable (Parrot's get)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plait.backends.errors import PlaitError
from plait.gateway.programs.growing_text import GrowingText
from plait.gateway.programs.held_call import Output
from plait.policy.programs.objectives_marks import Mark
from plait.policy.types import Slo


@dataclass(slots=True, eq=False)
class Getter:
    """One wait for one variable. `mark` is the objective that the client asks for (None: none).

    Either `on_value` or `on_failed` is called once, unless the getter is released first. `on_delta` receives the text
    so far whenever it has grown, if the variable has no transform. It receives another text when it begins again.
    The JCT counts from `since_s`, when the job began (None: it has not begun).
    """

    variable: str
    on_value: Callable[[str], None]
    on_failed: Callable[[PlaitError], None]
    mark: Mark | None = None
    on_delta: Callable[[GrowingText], None] | None = None
    since_s: float | None = None

    @property
    def jct_s(self) -> float | None:
        """The JCT that the client asks for, in seconds; None if it asks for none."""
        return self.mark.jct_s if isinstance(self.mark, Slo) else None

    def left_s(self, now_s: float) -> float | None:
        """The seconds left of the JCT: the whole JCT before the job begins; None without a JCT."""
        jct_s = self.jct_s
        return jct_s if jct_s is None or self.since_s is None else jct_s - (now_s - self.since_s)


def streaming(getters: Mapping[str, Sequence[Getter]], output: Output | None) -> list[Callable[[GrowingText], None]]:
    """The `on_delta` of those `getters`, by variable, that get an output's text as it grows: none with a transform."""
    if output is None or output.transform is not None:
        return []
    return [getter.on_delta for getter in getters.get(output.variable, ()) if getter.on_delta is not None]
