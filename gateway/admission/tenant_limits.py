"""What one tenant may use: calls and tokens a second, running calls, waiting calls."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from plait.backends.errors import LimitError

BURST_S = 10.0
"""A tenant may use up to so many seconds of its rate at once."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Infinite where there is no limit."""

    calls_per_s: float = inf
    tokens_per_s: float = inf
    max_running: float = inf
    max_waiting: float = inf


UNLIMITED = TenantLimits()


@dataclass(slots=True)
class TenantUse:
    """What one tenant uses. `running` counts its admitted calls. Rates are token buckets that hold `BURST_S` of use."""

    running: int = 0
    _calls: float = 0.0
    _tokens: float = 0.0
    _at_s: float = -inf

    def check_rate(self, limits: TenantLimits, tokens: int, now_s: float) -> None:
        """Raise `LimitError` if one more call of these tokens is beyond a rate.

        A call above a whole burst may go if nothing was used before.
        """
        if limits.calls_per_s == inf == limits.tokens_per_s:
            self._at_s = -inf  # what was used without a limit does not count later
            return
        elapsed_s = now_s - self._at_s
        self._at_s = now_s
        self._calls = _drained(self._calls, limits.calls_per_s, elapsed_s)
        self._tokens = _drained(self._tokens, limits.tokens_per_s, elapsed_s)
        for used, more, rate, unit in (
            (self._calls, 1, limits.calls_per_s, "calls"),
            (self._tokens, tokens, limits.tokens_per_s, "tokens"),
        ):
            over = used + more - max(BURST_S * rate, more) if rate < inf else 0.0
            if over > 0:
                raise LimitError(
                    f"This tenant may use {rate:g} {unit} a second; send the call again later.",
                    code=f"{unit}_per_second", retry_after_s=max(1.0, over / rate),
                )  # fmt: skip

    def enter(self, tokens: int) -> None:
        """A call was taken: it counts for the rates."""
        self._calls += 1
        self._tokens += tokens


def _drained(used: float, rate: float, elapsed_s: float) -> float:
    return 0.0 if inf in {rate, elapsed_s} else max(0.0, used - rate * elapsed_s)
