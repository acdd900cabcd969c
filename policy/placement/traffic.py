"""The traffic of one model: how long its answers are, over the whole fleet, and how many calls come.

An engine's own mean would make an engine look fast that happened to get calls with short answers.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

PRIOR_CALLS = 4.0
"""The expected output counts as so many calls until calls have ended."""

ARRIVALS_S = 60.0
"""Calls of about the last minute say how many come a second."""


class Coming(NamedTuple):
    """What is expected to come: calls a second to each engine, and the mean length of their prompts."""

    rate_s: float
    prompt_tokens: float


NOTHING_COMES = Coming(0.0, 0.0)


class Traffic:
    """A mean that forgets exponentially over `window_s`: O(1) in time and memory.

    `prior_output_tokens` is expected of an answer before any call has ended.
    """

    __slots__ = ("_ended", "_ended_s", "_output_tokens", "_prior", "_window_s")

    def __init__(self, window_s: float, prior_output_tokens: float) -> None:
        self._window_s = window_s
        self._prior = prior_output_tokens
        self._ended = 0.0
        self._ended_s = 0.0
        self._output_tokens = 0.0

    def ended(self, output_tokens: int, now_s: float) -> None:
        """A call got its whole answer."""
        kept = exp((self._ended_s - now_s) / self._window_s) if self._ended else 1.0
        self._ended = self._ended * kept + 1
        self._output_tokens = self._output_tokens * kept + output_tokens
        self._ended_s = now_s

    def expected_output_tokens(self, limit: int | None) -> float:
        """The mean length of an answer, or the call's output `limit` if that is less."""
        mean_tokens = (self._prior * PRIOR_CALLS + self._output_tokens) / (PRIOR_CALLS + self._ended)
        return mean_tokens if limit is None else min(mean_tokens, limit)


class Arrivals:
    """How many calls come a second, and how long their prompts are.

    Means that forget exponentially over `ARRIVALS_S`: O(1) in time and memory.
    """

    __slots__ = ("_began_s", "_calls", "_latest_s", "_prompt_tokens")

    def __init__(self, now_s: float) -> None:
        self._began_s = self._latest_s = now_s
        self._calls = self._prompt_tokens = 0.0

    def came(self, prompt_tokens: int, now_s: float) -> None:
        """A call has come."""
        kept = exp((self._latest_s - now_s) / ARRIVALS_S)
        self._calls = 1.0 + self._calls * kept
        self._prompt_tokens = prompt_tokens + self._prompt_tokens * kept
        self._latest_s = now_s

    def coming(self, engines: int, now_s: float) -> Coming:
        """What each of so many `engines` has to expect."""
        return Coming(self.rate_s(now_s) / engines, self._prompt_tokens / self._calls)

    def rate_s(self, now_s: float) -> float:
        """Calls a second. At least a second is looked at: the first calls are no burst."""
        known = 1.0 - exp(min(self._began_s - now_s, -1.0) / ARRIVALS_S)
        return self._calls * exp((self._latest_s - now_s) / ARRIVALS_S) / (ARRIVALS_S * known)


NO_TRAFFIC = Traffic(1.0, 0.0)
"""Of a model that nobody has called."""
