"""Translates a plan into the state to set for one prefill pass of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from plait.backends.sglang.calls import SglangCall
from plait.backends.sglang.prefill_pass import NO_LIMITS, PrefillPass
from plait.policy.scheduling.local_scheduler import EngineFacts, Plan


@dataclass(frozen=True, slots=True)
class Levers:
    """`shown` are the waiting calls that SGLang sees, in order. `goes_on` says whether the prompt in chunks continues.

    `prompt_tokens` is the most prompt tokens of the pass. `decodes` says whether decodes run too. `picks` are prompts
    and the tokens of each that the plan picks.
    """

    picks: Sequence[tuple[SglangCall, int]] = ()
    shown: Sequence[SglangCall] = ()
    goes_on: bool = False
    prompt_tokens: int = 0
    decodes: bool = True
    limits: PrefillPass = NO_LIMITS


def levers_of(plan: Plan, in_chunks: SglangCall | None, facts: EngineFacts, page_tokens: int) -> Levers:
    """The levers of a plan. `in_chunks` is the running call whose prompt is computed in chunks.

    SGLang counts a prompt's tokens in whole pages. At most one prompt is in chunks, so while it is held back, no other
    can be cut. If all others would have to be cut, it goes on instead: else nothing would run.
    """
    picks = cast("Sequence[tuple[SglangCall, int]]", plan.picks)
    backfill = cast("Sequence[SglangCall]", plan.backfill)
    prompts, decode_tokens = [], 0
    for call, tokens in picks:
        if call.waits or call is in_chunks:
            prompts.append((call, tokens))
        else:
            decode_tokens += tokens
    more = [call for call in backfill if call.waits or call is in_chunks]
    decodes = len(prompts) + len(more) < len(picks) + len(backfill)
    tokens = sum(-(-tokens // page_tokens) * page_tokens for _, tokens in prompts)
    if more:
        budget_tokens = facts.max_batch_tokens if plan.budget_tokens is None else plan.budget_tokens
        tokens = max(tokens, min(budget_tokens, facts.max_batch_tokens) - decode_tokens)
    if tokens <= 0:
        return Levers(decodes=decodes)
    named = [*(call for call, _ in prompts), *more]
    limits = {call.call_id: tokens for call, tokens in prompts if tokens < _wanted(call, facts)}
    shown = [call for call in named if call.waits]
    fits = any(call.call_id not in limits and _wanted(call, facts) <= tokens for call in shown)
    goes_on = in_chunks is not None and (in_chunks in named or not fits)
    return Levers(
        picks=prompts,
        shown=shown,
        goes_on=goes_on,
        prompt_tokens=tokens,
        decodes=decodes,
        limits=PrefillPass(limits, may_cut=in_chunks is None or goes_on),
    )


def _wanted(call: SglangCall, facts: EngineFacts) -> int:
    return call.uncomputed_tokens - (facts.cached_tokens(call) if call.waits else 0)
