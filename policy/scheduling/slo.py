"""Remaining times and iteration SLOs: the figures by which an engine meets its calls' objectives (AccelGen, 4.3).

A call's remaining time T_r is its slack: how much longer the call may wait and still meet its objectives. An iteration
SLO is how long the next iteration may take with the call in it. Both are in seconds from now, and negative if the call
is late.

TTFT slack is how much longer a call's first token may take than on an idle engine. The slack of recent calls predicts
the slack of the next arrivals.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.batching import Candidate
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Objective, Slo


class ExecutionTime(NamedTuple):
    """T_e, a prompt's execution time: `base_s`, and `chunk_s` for each `chunk_tokens` begun.

    It is computed from S_r, the prompt's tokens that are neither computed nor cached.
    """

    base_s: float
    chunk_tokens: float
    chunk_s: float

    def of(self, tokens: int) -> float:
        """T_e of a prompt with S_r `tokens`."""
        return self.base_s + -(-tokens // self.chunk_tokens) * self.chunk_s


def chunked_execution(pace: Pace) -> ExecutionTime:
    """The paper's T_e = N_ck T_max, with N_ck = ceil(S_r / L_c): each chunk takes as long as the longest iteration."""
    return ExecutionTime(0.0, pace.chunk_tokens, pace.longest_s)


def pivot_execution(pace: Pace) -> ExecutionTime:
    """Ours: T_e at the pivot's throughput; `chunked_execution` while the pivot is not known."""
    if pace.tokens_per_s is None:
        return chunked_execution(pace)
    return ExecutionTime(pace.shortest_s, 1, 1 / pace.tokens_per_s)


def token_slo_s(tpot_s: float, left_s: float, expected_tokens: float) -> float:
    """The iteration SLO of a call whose next token is due in `left_s`.

    A call that is ahead may use all its slack at once. A call that is behind catches up over its `expected_tokens`.
    Otherwise one late call would reduce the batch to decodes.
    """
    behind_s = tpot_s - left_s
    return left_s if behind_s <= 0 else tpot_s - behind_s / max(1.0, expected_tokens)


Timer = Callable[[LocalCall, Slo, int], tuple[float, float | None]]
"""Gives a call's T_r, and the time until its next token is due (None: no deadline), from its tokens to compute."""


class Objectives:
    """The objectives of an engine's calls. A call without an SLO has `default`, unless it is a throughput call."""

    def __init__(self, default: Slo | None = None) -> None:
        self._default = default
        self._first_token_s: dict[LocalCall, float] = {}

    def of(self, call: LocalCall) -> Slo | None:
        if call.slo is not None:
            return call.slo
        return None if call.objective is Objective.THROUGHPUT else self._default

    def any(self, *calls: Sequence[LocalCall]) -> bool:
        default = self._default
        for some in calls:
            for call in some:
                if call.slo is not None or (default is not None and self.of(call) is not None):
                    return True
        return False

    def on_plan(self, now_s: float, running: Sequence[LocalCall], ended: Iterable[LocalCall]) -> None:
        """Record the time of new first tokens, and forget the ended calls."""
        for call in ended:
            self._first_token_s.pop(call, None)
        first_token_s = self._first_token_s
        for call in running:
            if call.output_tokens and call not in first_token_s:
                first_token_s[call] = now_s

    def timer(self, now_s: float, pace: Pace, arrivals_slack_s: float | None = None) -> Timer:
        """A function that gives T_r and due times at `now_s`.

        A prompt with a JCT alone has the TTFT slack of arrivals, at least. How long its output takes is a guess, and by
        that guess a late prompt would go before the first tokens that can still be in time.
        """
        execution_s = self.execution(pace).of
        least_s = -inf if arrivals_slack_s is None else arrivals_slack_s

        def timing(call: LocalCall, slo: Slo, tokens: int) -> tuple[float, float | None]:
            due_s = self.due_s(call, slo, now_s, pace.jitter)
            remaining_s = inf if due_s is None else due_s - execution_s(tokens)
            if slo.jct_s is not None:
                whole_s = self.jct_remaining_s(call, slo.jct_s, now_s, tokens, pace)
                is_patient = slo.ttft_s is None and not call.output_tokens
                remaining_s = min(remaining_s, max(whole_s, least_s) if is_patient else whole_s)
            return remaining_s, due_s

        return timing

    def execution(self, pace: Pace) -> ExecutionTime:
        return pivot_execution(pace)

    def jct_remaining_s(self, call: LocalCall, jct_s: float, now_s: float, tokens: int, pace: Pace) -> float:
        """T_r of a call with a JCT: its whole slack."""
        expected_s = self.execution(pace).of(tokens) + pace.tokens_to_come(call) * pace.token_s
        return jct_s - (now_s - call.arrived_s) - expected_s

    def due_s(self, call: LocalCall, slo: Slo, now_s: float, jitter: float = 0.0) -> float | None:
        """The time until the next token is due; None without a deadline.

        The first token is due after the TTFT, less the share of it by which iterations may last longer. The n-th token
        after the first is due n TPOT after it.
        """
        if not call.output_tokens:
            return None if slo.ttft_s is None else (1 - jitter) * slo.ttft_s - (now_s - call.arrived_s)
        first_token_s = self._first_token_s.get(call)
        if slo.tpot_s is None or first_token_s is None:
            return None
        return first_token_s + slo.tpot_s * call.output_tokens - now_s

    def misses(self, call: LocalCall, slo: Slo, now_s: float, soonest_s: float) -> bool:
        """Whether the call misses its TTFT or JCT even if its next token comes in `soonest_s`."""
        elapsed_s = now_s - call.arrived_s
        if slo.jct_s is not None and elapsed_s + soonest_s > slo.jct_s:
            return True
        if slo.ttft_s is None:
            return False
        if call.output_tokens:
            first_token_s = self._first_token_s.get(call)
            return first_token_s is not None and first_token_s - call.arrived_s > slo.ttft_s
        return elapsed_s + soonest_s > slo.ttft_s

    def tightest_s(self, decodes: Sequence[LocalCall], now_s: float, pace: Pace) -> tuple[float, float]:
        """The tightest iteration SLO of the `decodes` by a TPOT, and by a JCT; infinite if none limits the iteration.

        A JCT without a TPOT limits the iteration to the time left for each token to come, but to no less than the
        shortest iteration, or than the shortest one with a prompt while the JCT has time for that. A TPOT under the
        shortest iteration, and a JCT that passes before the next token, cannot be met, so they are ignored. A deduced
        JCT is ignored, too: it is a whole group's, whose other prompts wait.
        """
        tpots_s, jcts_s, first_token_s = [], [], self._first_token_s
        shortest_s, prompt_s, tokens_to_come = pace.shortest_s, pace.prompt_s, pace.tokens_to_come
        for call in decodes:
            slo = call.slo or self.of(call)
            if slo is None:
                continue
            tpot_s = slo.tpot_s
            if tpot_s is not None:
                if tpot_s >= shortest_s:
                    left_s = first_token_s.get(call, now_s) + tpot_s * call.output_tokens - now_s
                    if left_s < tpot_s:
                        left_s = token_slo_s(tpot_s, left_s, pace.output_tokens(call))
                    tpots_s.append(left_s)
            elif slo.jct_s is not None and not slo.is_deduced:
                left_s = slo.jct_s - (now_s - call.arrived_s)
                if left_s >= shortest_s:
                    to_come = tokens_to_come(call)
                    least_s = prompt_s if left_s - to_come * shortest_s > prompt_s else shortest_s
                    jcts_s.append(max(left_s / to_come, least_s))
        return min(tpots_s, default=inf), min(jcts_s, default=inf)


SLACK_CALLS = 128
"""Ours: the slack of this many calls is remembered."""

SLACK_MEMORY_S = 60.0
"""Ours: a call's slack is remembered for this long."""


class TtftSlack:
    """The TTFT slack of the calls that started recently."""

    def __init__(self) -> None:
        self._starting_s: dict[LocalCall, float] = {}
        self._slacks_s: deque[tuple[float, float]] = deque()
        """(start time, slack) of each call, the latest last."""
        self._sorted_s: list[float] = []

    def expect(self, slacks_s: Mapping[LocalCall, float]) -> None:
        """The plan picked these calls. Each call's slack counts once the engine runs the call."""
        self._starting_s = dict(slacks_s)

    def on_plan(self, now_s: float, running: Sequence[LocalCall]) -> None:
        """Count the slack of the expected calls that the engine runs now."""
        for call in [call for call in running if call in self._starting_s] if self._starting_s else ():
            self.on_start(now_s, self._starting_s.pop(call))

    def on_start(self, now_s: float, slack_s: float) -> None:
        self._slacks_s.append((now_s, slack_s))
        insort(self._sorted_s, slack_s)
        if len(self._slacks_s) > SLACK_CALLS:
            self._sorted_s.remove(self._slacks_s.popleft()[1])

    def quartile_s(self, now_s: float) -> float | None:
        """The lower quartile of recent TTFT slack; None if no call with TTFT slack has started recently."""
        while self._slacks_s and self._slacks_s[0][0] < now_s - SLACK_MEMORY_S:
            self._sorted_s.remove(self._slacks_s.popleft()[1])
        return self._sorted_s[len(self._sorted_s) // 4] if self._slacks_s else None


def slacks_s(starting: Iterable[Candidate], objectives: Objectives, costs: CostModel | None) -> dict[LocalCall, float]:
    """The TTFT slack of the starting calls that have any; empty while the engine's cost model is not known."""
    slacks: dict[LocalCall, float] = {}
    if costs is None:
        return slacks
    for one in starting:
        slo = objectives.of(one.call)
        if slo is not None and slo.ttft_s is not None:
            slack_s = slo.ttft_s - costs.prefill_time_s(one.tokens, one.context_tokens)
            if slack_s > 0:
                slacks[one.call] = slack_s
    return slacks
