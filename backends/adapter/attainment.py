"""SLO attainment, measured in the engine: the share of calls that met all their objectives.

See docs/design/clocks.md.

A call counts when it ends, by the objectives that it has then. It has met its SLO if it has met its TTFT, its TPOT over
all tokens, and its JCT. All times count from its zero. An aborted call counts with the tokens that it had. Without
tokens, it counts only if its first token was overdue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass
from math import inf

from plait.policy.scheduling.plan import LocalCall

RECENT_CALLS = 256
"""The share covers this many latest calls with objectives, so its standard error is at most 3 %."""


@dataclass(slots=True)
class _Progress:
    """An engine's progress on one call; times in seconds on the engine's clock."""

    call: LocalCall
    zero_s: float
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def met(self, ended_s: float) -> bool | None:
        """Whether all objectives are met; None if there are none, or for a call without tokens that was not overdue."""
        slo = self.call.slo
        if slo is None:
            return None
        ttft_s, tpot_s, jct_s = (inf if limit_s is None else limit_s for limit_s in (slo.ttft_s, slo.tpot_s, slo.jct_s))
        if not self.tokens:
            return False if ended_s - self.zero_s > min(ttft_s, jct_s) else None
        gaps = self.tokens - 1
        decoded_in_time = gaps == 0 or self.last_s - self.first_s <= tpot_s * gaps
        return decoded_in_time and self.first_s - self.zero_s <= ttft_s and self.last_s - self.zero_s <= jct_s


class Attainment:
    """Takes the events of an engine's calls, in order of time. Calls that end without objectives do not count.

    `key` is the engine's name for a call.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, _Progress] = {}
        self._met: deque[bool] = deque(maxlen=RECENT_CALLS)

    @property
    def share(self) -> float | None:
        """The share of the latest `RECENT_CALLS` that met all objectives; None if no call with objectives has ended."""
        return sum(self._met) / len(self._met) if self._met else None

    def received(self, key: Hashable, call: LocalCall) -> None:
        """A call has arrived. Its `arrived_s` is its zero."""
        self._open[key] = _Progress(call, call.arrived_s)

    def produced(self, key: Hashable, tokens: int, now_s: float) -> None:
        """A call has `tokens` more output tokens."""
        progress = self._open.get(key)
        if progress is None or not tokens:
            return
        if not progress.tokens:
            progress.first_s = now_s
        progress.tokens += tokens
        progress.last_s = now_s

    def ended(self, key: Hashable, now_s: float) -> None:
        """A call has finished or was aborted. No effect if it had ended before."""
        progress = self._open.pop(key, None)
        met = progress.met(now_s) if progress is not None else None
        if met is not None:
            self._met.append(met)

    def retain(self, present: Container[Hashable], now_s: float) -> None:
        """All calls have ended except those whose keys are in `present`."""
        for key in [key for key in self._open if key not in present]:
            self.ended(key, now_s)
