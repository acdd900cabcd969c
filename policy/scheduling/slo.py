"""Objectives as an engine meets them, iteration by iteration: remaining times and iteration SLOs (AccelGen, 4.3).

A call's remaining time T_r is how much longer it may wait and still keep its promise. An iteration SLO is how long the
next iteration may take with the call in it. Both are seconds from now, and less than nothing once it is too late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Objective, Slo

Execution = Literal["chunks", "throughput"]
"""What is still to be computed takes N_ck T_max, as in the paper, or as long as at the pivot's throughput."""

JctSlack = Literal["spread", "whole"]
"""A job's slack counts as its share for the next iteration, as in the paper, or as a whole.

As a whole it orders calls and does not shorten iterations: what a job gains by that it loses in throughput.
"""


def execution_times(pace: Pace, execution: Execution = "chunks") -> Callable[[int], float]:
    """T_e of a prompt by its S_r, the tokens that are neither computed nor cached."""
    if execution == "throughput" and pace.tokens_per_s is not None:
        shortest_s, token_s = pace.shortest_s, 1 / pace.tokens_per_s
        return lambda tokens: shortest_s + tokens * token_s
    return lambda tokens: pace.chunks(tokens) * pace.longest_s


@dataclass(frozen=True, slots=True)
class JctSpread:
    """A JCT as a timetable of `chunks` + `output_tokens` iterations, made when the call starts.

    Each iteration may wait `slack_s` = (SLO - T_e) / (N_ck + S_g), and takes `iteration_s` = T_e / (N_ck + S_g).
    """

    chunks: int
    output_tokens: float
    slack_s: float
    iteration_s: float

    @classmethod
    def over(cls, jct_s: float, prompt_s: float, chunks: int, output_tokens: float, pace: Pace) -> JctSpread:
        """T_e = `prompt_s` + S_g (T_max + P_max P); negative slack means that it cannot hold on average."""
        expected_s = prompt_s + output_tokens * pace.token_s
        iterations = chunks + output_tokens
        return cls(chunks, output_tokens, (jct_s - expected_s) / iterations, expected_s / iterations)

    def remaining_s(self, elapsed_s: float, done: float) -> float:
        """T_r after `done` iterations in `elapsed_s`: what they over- or underused of their slack is carried on."""
        done = min(done, self.chunks + self.output_tokens - 1)
        return (done + 1) * self.slack_s - (elapsed_s - done * self.iteration_s)


def token_slo_s(tpot_s: float, left_s: float, expected_tokens: float) -> float:
    """The next token's iteration SLO: `left_s` until it is due, `tpot_s` after the one before it was.

    Who is ahead may use all of it at once; who is behind makes it up over the tokens still expected, so that one late
    call does not reduce the batch to decodes.
    """
    behind_s = tpot_s - left_s
    return left_s if behind_s <= 0 else tpot_s - behind_s / max(1.0, expected_tokens)


Timer = Callable[[LocalCall, Slo, int], tuple[float, float | None]]
"""T_r of a call with so many tokens left to compute, and when its next token is due (None: never), from now."""


class Objectives:
    """The objectives of an engine's calls. `default` is that of calls without one; throughput calls never get it."""

    def __init__(
        self, default: Slo | None = None, execution: Execution = "chunks", jct_slack: JctSlack = "spread"
    ) -> None:
        self._default = default
        self._execution: Execution = execution
        self._jct_slack: JctSlack = jct_slack
        self._first_token_s: dict[LocalCall, float] = {}
        self._spreads: dict[LocalCall, JctSpread] = {}

    def of(self, call: LocalCall) -> Slo | None:
        """What a call was promised."""
        if call.slo is not None:
            return call.slo
        return None if call.objective is Objective.THROUGHPUT else self._default

    def any(self, *calls: Sequence[LocalCall]) -> bool:
        """Whether any of these was promised anything."""
        if self._default is not None:
            return any(self.of(call) is not None for some in calls for call in some)
        return any([call.slo is not None for some in calls for call in some])  # noqa: C419 - half the time

    def follow(self, now_s: float, running: Sequence[LocalCall], ended: Iterable[LocalCall]) -> None:
        """Note whose first token has come by now, and forget the ended."""
        for call in ended:
            self._first_token_s.pop(call, None)
            self._spreads.pop(call, None)
        first_token_s = self._first_token_s
        for call in running:
            if call.output_tokens and call not in first_token_s:
                first_token_s[call] = now_s

    def timer(self, now_s: float, pace: Pace, *, runs: bool = False) -> Timer:
        """For waiting calls, or for running ones."""
        execution_s = execution_times(pace, self._execution)

        def timing(call: LocalCall, slo: Slo, tokens: int) -> tuple[float, float | None]:
            ttft_s = slo.ttft_s
            if call.output_tokens:
                due_s = self.due_s(call, slo, now_s)
            else:  # the many that wait for their first token
                due_s = None if ttft_s is None else ttft_s - (now_s - call.arrived_s)
            remaining_s = inf if due_s is None else due_s - execution_s(tokens)
            if slo.jct_s is not None:
                jct_remaining_s = self._jct_remaining_s(call, slo.jct_s, now_s, tokens, pace, runs=runs)
                remaining_s = min(remaining_s, jct_remaining_s)
            return remaining_s, due_s

        return timing

    def due_s(self, call: LocalCall, slo: Slo, now_s: float) -> float | None:
        """Until the next token is due: the first by the TTFT, the n-th after it by n TPOT; None: it never is."""
        if not call.output_tokens:
            return None if slo.ttft_s is None else slo.ttft_s - (now_s - call.arrived_s)
        first_token_s = self._first_token_s.get(call)
        if slo.tpot_s is None or first_token_s is None:
            return None
        return first_token_s + slo.tpot_s * call.output_tokens - now_s

    def too_late(self, call: LocalCall, slo: Slo, now_s: float, soonest_s: float) -> bool:
        """Whether an objective is missed even if the call's next token comes `soonest_s` from now."""
        elapsed_s = now_s - call.arrived_s
        if slo.jct_s is not None and elapsed_s + soonest_s > slo.jct_s:
            return True
        if slo.ttft_s is None:
            return False
        if call.output_tokens:
            first_token_s = self._first_token_s.get(call)
            return first_token_s is not None and first_token_s - call.arrived_s > slo.ttft_s
        return elapsed_s + soonest_s > slo.ttft_s

    def tightest_s(self, decodes: Iterable[LocalCall], now_s: float, pace: Pace) -> float:
        """The tightest iteration SLO of calls that have computed their prompts; infinite if nothing binds them.

        A TPOT under the shortest iteration cannot be kept, and does not bind.
        """
        tightest_s, first_token_s, shortest_s = inf, self._first_token_s, pace.shortest_s
        for call in decodes:
            slo = self.of(call)
            if slo is None:
                continue
            tpot_s = slo.tpot_s
            if tpot_s is not None and tpot_s >= shortest_s:
                left_s = first_token_s.get(call, now_s) + tpot_s * call.output_tokens - now_s
                if left_s < tpot_s:
                    left_s = token_slo_s(tpot_s, left_s, pace.output_tokens(call.objective))
                tightest_s = min(tightest_s, left_s)
            if slo.jct_s is not None and self._jct_slack == "spread":
                tightest_s = min(tightest_s, self._jct_slo_s(call, slo.jct_s, now_s, pace))
        return tightest_s

    def _jct_slo_s(self, call: LocalCall, jct_s: float, now_s: float, pace: Pace) -> float:
        """A soft deadline: being late does not squeeze the others, so it is never under the average."""
        spread = self._spread(call, jct_s, 1, pace, runs=True)
        share_s = spread.slack_s + spread.iteration_s
        if share_s < pace.shortest_s:
            return inf
        return max(share_s, self._spread_left_s(spread, call, now_s, 1, pace) + spread.iteration_s)

    def _jct_remaining_s(
        self, call: LocalCall, jct_s: float, now_s: float, tokens: int, pace: Pace, *, runs: bool
    ) -> float:
        spread = self._spread(call, jct_s, tokens, pace, runs=runs)
        if self._jct_slack == "spread":
            return self._spread_left_s(spread, call, now_s, tokens, pace)
        to_come = max(1.0, pace.output_tokens(call.objective) - call.output_tokens)
        expected_s = execution_times(pace, self._execution)(tokens) + to_come * pace.token_s
        return jct_s - (now_s - call.arrived_s) - expected_s

    def _spread(self, call: LocalCall, jct_s: float, tokens: int, pace: Pace, *, runs: bool) -> JctSpread:
        """A call that runs keeps the timetable that it started with."""
        spread = self._spreads.get(call)
        if spread is None:
            prompt_s = execution_times(pace, self._execution)(tokens)
            output_tokens = pace.output_tokens(call.objective)
            spread = JctSpread.over(jct_s, prompt_s, pace.chunks(tokens), output_tokens, pace)
            if runs:
                self._spreads[call] = spread
        return spread

    def _spread_left_s(self, spread: JctSpread, call: LocalCall, now_s: float, tokens: int, pace: Pace) -> float:
        chunks_done = spread.chunks if call.output_tokens else max(0, spread.chunks - pace.chunks(tokens))
        return spread.remaining_s(now_s - call.arrived_s, chunks_done + call.output_tokens)
