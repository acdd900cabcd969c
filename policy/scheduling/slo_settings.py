"""What the `slo` local scheduler does: its settings. Each of its methods can be switched off, for ablations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.policy.scheduling.batching import WINDOW_S
from plait.policy.scheduling.slo import Execution, JctSlack
from plait.policy.types import Slo

LONG_TOKENS = 4096
"""DESIGN 4.5: uncached tokens from which on a prompt is long; AccelGen calls prompts of 4K tokens and more long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """What the scheduler does; the defaults are what ships.

    default_slo: the objectives of calls without any (AccelGen: a TPOT of 0.1875 s, reading speed).
    budget: `model` solves the iteration-time model, `pivot` is equation 6, `engine` is the engine's own maximum.
    order: by T_r, with urgent calls and preemption for them, or by `arrival`.
    selection: `distance` to what is left of compute and KV within `window_s`, or in `order`.
    long_prompts: whether a new one waits until those that run are `completed`, are `prefilled`, or not at all.
    lost: whether a call that cannot meet its TTFT or JCT any more goes behind those that can, or keeps its place.
    execution, jct_slack: how T_e and the slack of a JCT are reckoned (`plait.policy.scheduling.slo`).
    best_effort_share, lost_share: shares of the budget that are kept for calls without an SLO, or for lost ones only.
    floor_share: of the engine's maximum, for prompts while decodes by themselves take longer than their SLO.
    preempt: for urgent calls, `spare` ones (those without an objective, or that have missed theirs), `any` that stays
      in time itself, or `never`.
    max_preemptions: how often a call makes room for urgent ones at most.
    pause: whether decodes that can wait are left out of an iteration that would be too long for a first token.
    spare_share: an iteration in which nothing is urgent takes at most this share of what recent arrivals could spare of
      their TTFT, if that can be; 0 lets it take as long as the budget allows.
    watermark_blocks: left free for each running decode when a prompt is admitted.
    """

    default_slo: Slo | None = None
    budget: Literal["model", "pivot", "engine"] = "model"
    order: Literal["remaining", "arrival"] = "remaining"
    selection: Literal["distance", "order"] = "distance"
    window_s: float = WINDOW_S
    long_prompts: Literal["until_completed", "until_prefilled", "any"] = "until_prefilled"
    long_tokens: int = LONG_TOKENS
    lost: Literal["demote", "keep"] = "demote"
    execution: Execution = "throughput"
    jct_slack: JctSlack = "whole"
    best_effort_share: float = 0.1
    lost_share: float = 0.02
    floor_share: float = 0.1
    max_preemptions: int = 8
    preempt: Literal["never", "spare", "any"] = "spare"
    pause: bool = True
    spare_share: float = 0.5
    watermark_blocks: int = 2
