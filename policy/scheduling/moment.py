"""What a plan is made from: the engine at one moment, with its running calls told apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from plait.policy.scheduling.batching import Candidate
from plait.policy.scheduling.chunking import Budget
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import EngineFacts, LocalCall
from plait.policy.scheduling.preemption_history import PreemptionHistory
from plait.policy.scheduling.slo import Objectives
from plait.policy.scheduling.slo_settings import SloSettings

DECODE_TOKENS = 8
"""A call behind its prompt with no more than this to compute decodes; with more it recomputes what was preempted."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Nothing of this changes while a plan is made.

    `long_calls` are the running calls that were started as long prompts. `empty_budget` is that of an iteration with
    nothing in it. `may_pause` says whether running decodes may be left out. `arrivals_slack_s` is the TTFT slack that
    arrivals are expected to have, None where none are expected.
    """

    now_s: float
    waiting: Sequence[LocalCall]
    decodes: Sequence[Candidate]
    prefills: Sequence[Candidate]
    facts: EngineFacts
    settings: SloSettings
    objectives: Objectives
    pace: Pace
    preemptions: PreemptionHistory
    long_calls: Collection[LocalCall]
    empty_budget: Budget
    may_pause: bool
    arrivals_slack_s: float | None

    @cached_property
    def preemption_order(self) -> list[Candidate]:
        """The running calls, the cheapest victim last; of equals the latest arrival, and prompts.

        Calls with objectives at stake come in ascending T_r, then the others, the most tokens to compute again first.
        """
        timing = self.objectives.timer(self.now_s, self.pace)
        for decode in self.decodes:  # only now, since mostly there is room for all of them
            slo = self.objectives.of(decode.call)
            if slo is not None:
                decode.remaining_s = timing(decode.call, slo, 1)[0]
                decode.missed_slo = self.objectives.misses(decode.call, slo, self.now_s, 0.0)
        return sorted([*self.decodes, *self.prefills], key=preemption_key)


def preemption_key(candidate: Candidate) -> tuple[float, float]:
    """The greater, the sooner a call is preempted."""
    if candidate.loses_nothing:
        return inf, -candidate.context_tokens
    return candidate.remaining_s, 0.0


def split_running(
    running: Iterable[LocalCall], long_calls: Collection[LocalCall]
) -> tuple[list[Candidate], list[Candidate]]:
    """The decodes and the prefills among the running calls; a prefill is long if it was started as such."""
    decodes, prefills = [], []
    for call in running:
        computed = call.computed_tokens
        tokens = call.prompt_tokens + call.output_tokens - computed
        candidate = Candidate(call, tokens, computed, False)
        if computed >= call.prompt_tokens and tokens <= DECODE_TOKENS:
            decodes.append(candidate)
        else:
            candidate.is_long = call in long_calls
            prefills.append(candidate)
    return decodes, prefills


def time_prefills(
    prefills: Iterable[Candidate], objectives: Objectives, now_s: float, pace: Pace, empty_budget: Budget
) -> None:
    """Note how much time its objectives leave each prefill."""
    timing = objectives.timer(now_s, pace)
    for prefill in prefills:
        slo = objectives.of(prefill.call)
        if slo is not None:
            prefill.remaining_s, prefill.due_s = timing(prefill.call, slo, prefill.tokens)
            soonest_s = empty_budget.time_s(prefill.tokens, prefill.context_tokens)
            prefill.missed_slo = objectives.misses(prefill.call, slo, now_s, soonest_s)
