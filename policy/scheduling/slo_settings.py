"""What a user may set of the `slo` local scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from plait.policy.types import Slo

LONG_TOKENS = 4096
"""Uncached tokens from which on a prompt is long: AccelGen calls prompts of 4K tokens and more long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """The defaults are what ships.

    default_slo: the objectives of calls without any (AccelGen: a TPOT of 0.1875 s, reading speed).
    long_tokens: prompts with this many uncached tokens are long; long ones start one at a time.
    best_effort_share: the share of an iteration's tokens that calls without objectives get at least.
    max_preemptions: how often a call makes room for urgent ones at most.
    """

    default_slo: Slo | None = None
    long_tokens: int = LONG_TOKENS
    best_effort_share: float = 0.1
    max_preemptions: int = 8
