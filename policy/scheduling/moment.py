"""A plan's input: the settings, and the engine's state with its running calls split into decodes and prefills."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from plait.policy.scheduling.batching import Candidate, Decode
from plait.policy.scheduling.chunking import Budget
from plait.policy.scheduling.pace import Pace, PreemptionHistory
from plait.policy.scheduling.plan import EngineFacts, LocalCall
from plait.policy.scheduling.slo import Objectives
from plait.policy.types import Slo

LONG_TOKENS = 4096
"""A prompt with at least this many uncached tokens is long. AccelGen has the same bound, 4K tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """The settings. The defaults are the shipped values.

    default_slo: the SLO of calls without one, except throughput calls (AccelGen: a TPOT of 0.1875 s, reading speed).
    long_tokens: prompts with at least this many uncached tokens are long. Long prompts start one at a time.
    best_effort_share: this share of the tokens left is reserved for best-effort calls.
    slack_shares: beside best-effort calls, an iteration may take this share of the arrivals' TTFT slack. On an engine
    that plans ahead, the second: an arrival waits there for the rest of an iteration and for the whole of the next.
    max_preemptions: a call that was preempted this often is not preempted again for an urgent call.
    """

    default_slo: Slo | None = None
    long_tokens: int = LONG_TOKENS
    best_effort_share: float = 0.1
    slack_shares: tuple[float, float] = (0.5, 0.35)
    max_preemptions: int = 8


DECODE_TOKENS = 8
"""Ours: a running call past its prompt is a decode if it has at most this many tokens to compute. With more, it is a
prefill that recomputes a preempted call.
"""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of the engine, constant while a plan is made."""

    now_s: float
    waiting: Sequence[LocalCall]
    decodes: Sequence[Decode]
    """The running calls past their prompts."""
    prefills: Sequence[Candidate]
    """The other running calls."""
    facts: EngineFacts
    settings: SloSettings
    objectives: Objectives
    pace: Pace
    preemptions: PreemptionHistory
    long_calls: Collection[LocalCall]
    """The running calls that started as long prompts."""
    empty_budget: Budget
    """The budget of an empty iteration."""
    may_pause: bool
    """Whether the plan may leave out running decodes."""
    arrivals_slack_s: float | None
    """The TTFT slack expected of arrivals; None: no arrivals are expected."""

    @cached_property
    def decode_candidates(self) -> list[Candidate]:
        """The `decodes` as candidates, for the plans that leave some out."""
        return [Candidate(*decode, waits=False) for decode in self.decodes]

    @cached_property
    def preemption_order(self) -> list[Candidate]:
        """The running calls, cheapest victim last.

        Calls with objectives at stake come first, in ascending T_r. The other calls follow, those with most tokens to
        recompute first. Ties: decodes before prefills, earlier before later arrivals.
        """
        timing = self.objectives.timer(self.now_s, self.pace)
        for decode in self.decode_candidates:  # timed only here: most plans preempt no call
            slo = self.objectives.of(decode.call)
            if slo is not None:
                decode.remaining_s = timing(decode.call, slo, 1)[0]
                decode.missed_slo = self.objectives.misses(decode.call, slo, self.now_s, 0.0)
        return sorted([*self.decode_candidates, *self.prefills], key=preemption_key)


def waiting_candidate(moment: Moment, call: LocalCall) -> Candidate:
    cached = moment.facts.cached_tokens(call)
    tokens = call.uncomputed_tokens - cached
    return Candidate(call, tokens, cached, waits=True, is_long=tokens >= moment.settings.long_tokens)


def preemption_key(candidate: Candidate) -> tuple[float, float]:
    """Sort key: calls with greater keys are preempted sooner."""
    if candidate.loses_nothing:
        return inf, -candidate.context_tokens
    return candidate.remaining_s, 0.0


def split_running(
    running: Iterable[LocalCall], long_calls: Collection[LocalCall]
) -> tuple[list[Decode], list[Candidate]]:
    """Returns the decodes and the prefills among the running calls. A prefill is long if it started as one."""
    decodes, prefills = [], []
    for call in running:
        computed, prompt_tokens = call.computed_tokens, call.prompt_tokens
        tokens = prompt_tokens + call.output_tokens - computed
        if computed >= prompt_tokens and tokens <= DECODE_TOKENS:
            decodes.append((call, tokens, computed))
        else:
            prefills.append(Candidate(call, tokens, computed, waits=False, is_long=call in long_calls))
    return decodes, prefills


def time_prefills(moment: Moment) -> None:
    """Set each prefill's T_r, the time until its token is due, and whether it has missed its SLO."""
    objectives, now_s = moment.objectives, moment.now_s
    timing = objectives.timer(now_s, moment.pace, moment.arrivals_slack_s)
    for prefill in moment.prefills:
        slo = objectives.of(prefill.call)
        if slo is not None:
            prefill.remaining_s, prefill.due_s = timing(prefill.call, slo, prefill.tokens)
            soonest_s = moment.empty_budget.time_s(prefill.tokens, prefill.context_tokens)
            prefill.missed_slo = objectives.misses(prefill.call, slo, now_s, soonest_s)
