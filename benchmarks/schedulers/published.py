"""AccelGen's own choices where Plait's scheduler has others: equation 6, execution in chunks, spread JCT slack."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from plait.policy.cost_model import Pivot
from plait.policy.scheduling.chunking import Budget
from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.pace import Pace
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.slo import ExecutionTime, Objectives, chunked_execution
from plait.policy.types import Slo


class PivotBudget:
    """Equation 6: time goes with the tokens alone, as at the pivot. Without a pivot only `max_tokens` counts."""

    def __init__(self, max_tokens: int, pivot: Pivot | None) -> None:
        self.tokens = 0
        self.limit_s = inf
        self._max_tokens = max_tokens
        self._token_s = pivot.time_s / pivot.tokens if pivot else 0.0

    def time_s(self, new_tokens: int = 0, context_tokens: int = 0) -> float:
        """How long the iteration would take with one more call in it."""
        del context_tokens
        return (self.tokens + new_tokens) * self._token_s

    def room(self, wanted_tokens: int, context_tokens: int = 0) -> int:
        """How many of a call's tokens it has room for."""
        del context_tokens
        most = min(wanted_tokens, self._max_tokens - self.tokens)
        if self._token_s and self.limit_s < inf:
            # Rounding may not lose the last token of a budget that comes out whole.
            most = min(most, int(self.limit_s / self._token_s + 1e-9) - self.tokens)
        return max(0, most)

    def take(self, new_tokens: int, context_tokens: int = 0) -> None:
        """Compute so many of a call's tokens in it."""
        del context_tokens
        self.tokens += new_tokens

    def give_back(self, new_tokens: int, context_tokens: int = 0) -> None:
        """Undo a `take`."""
        del context_tokens
        self.tokens -= new_tokens

    def take_decodes(self, new_tokens: int, context_tokens: int) -> None:
        """Compute decodes of so many tokens in all."""
        self.take(new_tokens, context_tokens)


def pivot_budget(max_tokens: int, model: IterationModel) -> Budget:
    """Equation 6 at the engine's pivot."""
    return PivotBudget(max_tokens, model.pivot)


class ChunkedObjectives(Objectives):
    """T_e = N_ck T_max, whatever is known of the engine."""

    def execution(self, pace: Pace) -> ExecutionTime:
        """Each chunk takes as long as the longest iteration."""
        return chunked_execution(pace)


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


class SpreadObjectives(Objectives):
    """A job's slack counts as its share for the next iteration, so that it shortens iterations too."""

    def __init__(self, default: Slo | None = None) -> None:
        super().__init__(default)
        self._spreads: dict[LocalCall, JctSpread] = {}
        self._running: Collection[LocalCall] = ()

    def on_plan(self, now_s: float, running: Sequence[LocalCall], ended: Iterable[LocalCall]) -> None:
        """A call that runs keeps the timetable that it started with."""
        ended = list(ended)
        super().on_plan(now_s, running, ended)
        self._running = set(running)
        for call in ended:
            self._spreads.pop(call, None)

    def jct_remaining_s(self, call: LocalCall, jct_s: float, now_s: float, tokens: int, pace: Pace) -> float:
        """T_r by the call's timetable."""
        return self._left_s(self._spread(call, jct_s, tokens, pace), call, now_s, tokens, pace)

    def tightest_s(self, decodes: Sequence[LocalCall], now_s: float, pace: Pace) -> float:
        """The tightest of the decodes' iteration SLOs, those of jobs included."""
        tightest_s = super().tightest_s(decodes, now_s, pace)
        for call in decodes:
            slo = self.of(call)
            if slo is not None and slo.jct_s is not None:
                tightest_s = min(tightest_s, self._jct_slo_s(call, slo.jct_s, now_s, pace))
        return tightest_s

    def _jct_slo_s(self, call: LocalCall, jct_s: float, now_s: float, pace: Pace) -> float:
        """A soft deadline: being late does not squeeze the others, so it is never under the average."""
        spread = self._spread(call, jct_s, 1, pace)
        share_s = spread.slack_s + spread.iteration_s
        if share_s < pace.shortest_s:
            return inf
        return max(share_s, self._left_s(spread, call, now_s, 1, pace) + spread.iteration_s)

    def _spread(self, call: LocalCall, jct_s: float, tokens: int, pace: Pace) -> JctSpread:
        spread = self._spreads.get(call)
        if spread is None:
            prompt_s = self.execution(pace)(tokens)
            spread = JctSpread.over(jct_s, prompt_s, pace.chunks(tokens), pace.output_tokens(call.objective), pace)
            if call in self._running:
                self._spreads[call] = spread
        return spread

    def _left_s(self, spread: JctSpread, call: LocalCall, now_s: float, tokens: int, pace: Pace) -> float:
        chunks_done = spread.chunks if call.output_tokens else max(0, spread.chunks - pace.chunks(tokens))
        return spread.remaining_s(now_s - call.arrived_s, chunks_done + call.output_tokens)
