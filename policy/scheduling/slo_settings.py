"""The settings of the `slo` local scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from plait.policy.types import Slo

LONG_TOKENS = 4096
"""A prompt with at least this many uncached tokens is long: AccelGen calls prompts of 4K tokens and more long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """The defaults are the shipped values.

    default_slo: the objectives of calls without any (AccelGen: a TPOT of 0.1875 s, reading speed).
    long_tokens: prompts with at least this many uncached tokens are long; long prompts start one at a time.
    best_effort_share: best-effort calls get at least this share of the tokens that an iteration has left.
    max_preemptions: a call is preempted for urgent calls at most this often.
    """

    default_slo: Slo | None = None
    long_tokens: int = LONG_TOKENS
    best_effort_share: float = 0.1
    max_preemptions: int = 8
