"""What is sent: long prompts at a steady rate, and short calls that arrive at random while those are computed."""

from __future__ import annotations

import random
from dataclasses import dataclass

TOKEN_IDS = range(300, 8000)
"""Ids that the tiny model's vocabulary has and that mean nothing special."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One run: a long prompt each `period_s` seconds, and short calls as a Poisson process over the same time.

    The period is measured before the first run. Short calls are not shorter, because a tiny model's TTFT would then be
    mostly HTTP and hand-overs between processes, which no scheduler shortens.
    """

    period_s: float = 0.0
    longs: int = 10
    long_tokens: int = 6000
    long_output_tokens: int = 32
    shorts_per_long: float = 4.0
    short_tokens: int = 512
    short_output_tokens: int = 16


@dataclass(frozen=True, slots=True)
class BenchCall:
    """One call: `at_s` is when it is sent, in seconds from the beginning of the run."""

    at_s: float
    prompt: list[int]
    output_tokens: int
    is_long: bool


class CallSource:
    """Makes calls whose prompts share nothing; the same seed makes the same ones."""

    def __init__(self, shape: Shape, seed: str) -> None:
        self._shape = shape
        self._rng = random.Random(seed)

    def long(self, at_s: float = 0.0) -> BenchCall:
        """A long prompt."""
        return self._call(at_s, self._shape.long_tokens, self._shape.long_output_tokens, is_long=True)

    def short(self, at_s: float = 0.0) -> BenchCall:
        """A short call, one of those with an objective."""
        return self._call(at_s, self._shape.short_tokens, self._shape.short_output_tokens, is_long=False)

    def run(self) -> list[BenchCall]:
        """All calls of a run, in order of arrival."""
        shape = self._shape
        calls = [self.long(number * shape.period_s) for number in range(shape.longs)]
        rate_per_s = shape.shorts_per_long / shape.period_s
        at_s = self._rng.expovariate(rate_per_s)
        while at_s < shape.longs * shape.period_s:
            calls.append(self.short(at_s))
            at_s += self._rng.expovariate(rate_per_s)
        return sorted(calls, key=lambda call: call.at_s)

    def _call(self, at_s: float, prompt_tokens: int, output_tokens: int, *, is_long: bool) -> BenchCall:
        return BenchCall(at_s, self._rng.choices(TOKEN_IDS, k=prompt_tokens), output_tokens, is_long)
