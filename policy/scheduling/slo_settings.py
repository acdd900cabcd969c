"""The settings of the `slo` local scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from plait.policy.types import Slo

LONG_TOKENS = 4096
"""A prompt with at least this many uncached tokens is long. AccelGen has the same bound, 4K tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """The settings. The defaults are the shipped values.

    default_slo: the SLO of calls without one, except throughput calls (AccelGen: a TPOT of 0.1875 s, reading speed).
    long_tokens: prompts with at least this many uncached tokens are long. Long prompts start one at a time.
    best_effort_share: this share of the tokens left is reserved for best-effort calls.
    max_preemptions: a call that was preempted this often is not preempted again for an urgent call.
    """

    default_slo: Slo | None = None
    long_tokens: int = LONG_TOKENS
    best_effort_share: float = 0.1
    max_preemptions: int = 8
