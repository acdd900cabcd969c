"""How an engine has lately been running: what remaining times are reckoned with (AccelGen, section 4.3).

Measured from what the adapter observes of iterations and from the calls that successive plans are asked about.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear, Pivot
from plait.policy.scheduling.plan import RECENT_ITERATIONS, LocalCall
from plait.policy.types import Objective

PREEMPTION_ITERATIONS = 1024
"""DESIGN 4.5: P and P_max are taken over these; rarer than iterations, so over more of them."""

START_OUTPUT_TOKENS = 211.0
"""S_g until calls have ended: the mean of the Azure conversation trace (2023)."""

SPARE_CALLS = 128
"""Calls whose time to spare is remembered."""

SPARE_MEMORY_S = 60.0
"""Ours: for how long it is remembered that calls with a TTFT come."""

FIT_DECAY = 1 - 1 / 256
"""Weight of an iteration in the fitted model, one iteration later: a memory of 256."""

MIN_ITERATIONS = 8
"""Before a model is fitted to them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The paper's figures: T_max, L_c, P, P_max, and S_pf / T_pf as `tokens_per_s` (None: not known yet)."""

    longest_s: float
    shortest_s: float
    chunk_tokens: float
    preemption_rate: float = 0.0
    longest_preemption_s: float = 0.0
    tokens_per_s: float | None = None
    mean_outputs: Mapping[Objective | None, float] = field(default_factory=dict)
    pivot_tokens: int = 0
    """S_pf, at most the engine's own maximum."""

    def output_tokens(self, objective: Objective | None) -> float:
        """S_g: the mean output of calls with this objective that have ended lately."""
        return self.mean_outputs.get(objective, START_OUTPUT_TOKENS)

    def chunks(self, tokens: int) -> int:
        """N_ck = ceil(S_r / L_c): iterations until these tokens are computed; 1 for a decode."""
        return max(1, ceil(tokens / self.chunk_tokens))

    @property
    def token_s(self) -> float:
        """The most one generated token takes: T_max + P_max P."""
        return self.longest_s + self.longest_preemption_s * self.preemption_rate


class Measurements:
    """Gathers a `Pace`. Until told otherwise an engine is taken to compute `max_batch_tokens` in no time."""

    def __init__(self) -> None:
        self._costs: CostModel | None = None
        self._fitted = _Fit()
        self._given = False
        self._pivot: Pivot | None = None
        self._fits = True
        """Whether the two are up to date: solving for them waits until somebody plans by them."""
        self._durations_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._chunks: deque[int] = deque(maxlen=RECENT_ITERATIONS)
        self._chunk_tokens = 0
        self._generated: deque[int] = deque(maxlen=PREEMPTION_ITERATIONS)
        self._generated_tokens = 0
        self._preempted_s: deque[tuple[int, float]] = deque()
        """(iteration, how long) of each preemption that has ended, as far as the window reaches back."""
        self._iteration = 0
        self._outputs: dict[Objective | None, deque[int]] = {}
        self._output_sums: dict[Objective | None, int] = {}
        self._running: dict[LocalCall, None] = {}
        self._preempted: dict[LocalCall, float] = {}
        self._times_preempted: dict[LocalCall, int] = {}
        self._spares_s: deque[tuple[float, float]] = deque()
        """(when, how much) of the latest calls, and how much in ascending order."""
        self._sorted_spares_s: list[float] = []

    @property
    def costs(self) -> CostModel | None:
        """How long iterations take, once known."""
        if not self._fits:
            self._costs = self._fitted.costs()
            self._pivot = self._costs.pivot() if self._costs else None
            self._fits = True
        return self._costs

    @property
    def pivot(self) -> Pivot | None:
        """S_pf and T_pf, once known."""
        return self._pivot if self.costs else None

    def times_preempted(self, call: LocalCall) -> int:
        """How often a call of this engine has been preempted."""
        return self._times_preempted.get(call, 0)

    def expect(self, costs: CostModel) -> None:
        """Use a fitted model instead of measuring one."""
        self._costs, self._given, self._pivot, self._fits = costs, True, costs.pivot(), True

    def spared(self, now_s: float, seconds: float) -> None:
        """A call has started that could have waited so long for its first token on an idle engine."""
        self._spares_s.append((now_s, seconds))
        insort(self._sorted_spares_s, seconds)
        if len(self._spares_s) > SPARE_CALLS:
            self._sorted_spares_s.remove(self._spares_s.popleft()[1])

    def spare_s(self, now_s: float) -> float | None:
        """What three quarters of the latest calls with a TTFT could at least spare of it on an idle engine, if any."""
        while self._spares_s and self._spares_s[0][0] < now_s - SPARE_MEMORY_S:
            self._sorted_spares_s.remove(self._spares_s.popleft()[1])
        return self._sorted_spares_s[len(self._sorted_spares_s) // 4] if self._spares_s else None

    def observe(self, duration_s: float, work: Sequence[tuple[int, int]]) -> None:
        """An iteration is over: `work` is (new tokens, context tokens) of each of its calls."""
        self._iteration += 1
        self._durations_s.append(duration_s)
        chunks = [new for new, _ in work if new > 1]
        decodes = len(work) - len(chunks)
        if len(self._generated) == PREEMPTION_ITERATIONS:
            self._generated_tokens -= self._generated[0]
        self._generated.append(decodes)
        self._generated_tokens += decodes
        for chunk in chunks:
            if len(self._chunks) == RECENT_ITERATIONS:
                self._chunk_tokens -= self._chunks[0]
            self._chunks.append(chunk)
            self._chunk_tokens += chunk
        while self._preempted_s and self._preempted_s[0][0] <= self._iteration - PREEMPTION_ITERATIONS:
            self._preempted_s.popleft()
        if not self._given:
            self._fitted.add(work, duration_s)
            self._fits = False

    def follow(self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall]) -> list[LocalCall]:
        """Compare with the calls of the last plan; returns those that have left the engine since."""
        before, self._running = self._running, dict.fromkeys(running)
        gone = [call for call in before if call not in self._running]
        if not gone and not self._preempted:
            return []
        still = set(waiting)
        for call in list(self._preempted):
            if call in self._running:
                self._preempted_s.append((self._iteration, now_s - self._preempted.pop(call)))
            elif call not in still:
                del self._preempted[call]
                gone.append(call)
        ended = [call for call in gone if call not in still]
        for call in gone:
            if call in still:
                self._preempted[call] = now_s
                self._times_preempted[call] = self.times_preempted(call) + 1
        for call in ended:
            self._ended(call)
        return ended

    def pace(self, max_batch_tokens: int) -> Pace:
        """The figures now; before the first iteration T_max is T_pf and L_c is S_pf."""
        costs, pivot, durations_s, chunks = self.costs, self.pivot, self._durations_s, self._chunks
        pivot_s = pivot.time_s if pivot else 0.0
        pivot_tokens = min(pivot.tokens, max_batch_tokens) if pivot else max_batch_tokens
        preemptions = len(self._preempted_s)
        return Pace(
            longest_s=max(durations_s, default=pivot_s),
            shortest_s=costs.iteration_time_s(((1, 0),)) if costs else 0.0,
            chunk_tokens=self._chunk_tokens / len(chunks) if chunks else float(pivot_tokens),
            preemption_rate=preemptions / max(1, self._generated_tokens),
            longest_preemption_s=max((seconds for _, seconds in self._preempted_s), default=0.0),
            tokens_per_s=pivot.tokens / pivot.time_s if pivot and pivot.time_s > 0 else None,
            pivot_tokens=pivot_tokens,
            mean_outputs={kind: self._output_sums[kind] / len(outputs) for kind, outputs in self._outputs.items()},
        )

    def _ended(self, call: LocalCall) -> None:
        self._times_preempted.pop(call, None)
        outputs = self._outputs.setdefault(call.objective, deque(maxlen=PREEMPTION_ITERATIONS))
        dropped = outputs[0] if len(outputs) == PREEMPTION_ITERATIONS else 0
        outputs.append(max(1, call.output_tokens))
        self._output_sums[call.objective] = self._output_sums.get(call.objective, 0) + outputs[-1] - dropped


TERMS = ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2), (0, 1))
"""Models to try, by their terms: one with a negative coefficient would say that more work takes less time."""


class _Fit:
    """Iteration time as a constant, so much a new token, a token that attention reads, and a pair of both in a prompt.

    Least squares over all iterations with prompts in them, older ones weighing less. Small iterations take as long as
    decodes alone do: the weights have to be read whatever is computed with them.
    """

    def __init__(self) -> None:
        self._sums = [[0.0] * 5 for _ in range(4)]
        """The normal equations' matrix with their right side."""
        self._decodes = (0.0, 0.0, 0.0)
        """Iterations of decodes alone: how many, and the sums of their sequence tokens and their seconds."""

    def add(self, work: Sequence[tuple[int, int]], seconds: float) -> None:
        """An iteration was measured."""
        new_tokens = sum(new for new, _ in work)
        sequence_tokens = new_tokens + sum(context for _, context in work)
        pairs = sum(new * (new + context) for new, context in work if new > 1)
        if not pairs:
            count, sequences, total_s = (total * FIT_DECAY for total in self._decodes)
            self._decodes = (count + 1, sequences + sequence_tokens, total_s + seconds)
            return
        row = (1.0, new_tokens, sequence_tokens, pairs, seconds)
        for sums, left in zip(self._sums, row, strict=False):
            for column, right in enumerate(row):
                sums[column] = sums[column] * FIT_DECAY + left * right

    def costs(self) -> CostModel | None:
        """None until iterations of clearly different sizes have been seen, the larger ones taking longer."""
        count, new, squares = self._sums[0][0], self._sums[0][1], self._sums[1][1]
        if count < MIN_ITERATIONS or count * squares - new * new < 0.01 * new * new:  # spread: a tenth of the mean
            return None
        for terms in TERMS:
            found = _solved([[self._sums[i][j] for j in (*terms, 4)] for i in terms])
            if found is not None and found[1] > 0 and min(found[1:]) >= 0:
                by_term = dict(zip(terms, found, strict=True))
                forward = self._forward(by_term[0], by_term[1], by_term.get(2, 0.0))
                return CostModel(forward, 0.0, by_term.get(2, 0.0), 0.0, LongAttention(product_s=by_term.get(3, 0.0)))
        return None

    def _forward(self, constant_s: float, token_s: float, context_s: float) -> PiecewiseLinear:
        count, sequences, total_s = self._decodes
        constant_s = max(0.0, constant_s)
        least_s = (total_s - context_s * sequences) / count if count else 0.0
        if least_s <= constant_s:
            return PiecewiseLinear(((0, constant_s),), token_s)
        crossing = max(1, round((least_s - constant_s) / token_s))
        return PiecewiseLinear(((0, least_s), (crossing, max(least_s, constant_s + crossing * token_s))), token_s)


def _solved(equations: list[list[float]]) -> list[float] | None:
    """The unknowns of as many symmetric equations, by elimination; None if they say too little."""
    rows = [list(row) for row in equations]
    for i, pivot in enumerate(rows):
        if pivot[i] <= 1e-6 * equations[i][i]:
            return None
        for other in rows[i + 1 :]:
            share = other[i] / pivot[i]
            for j in range(i, len(pivot)):
                other[j] -= share * pivot[j]
    unknowns: list[float] = []
    for i in range(len(rows) - 1, -1, -1):
        known = sum(coefficient * value for coefficient, value in zip(rows[i][i + 1 : -1], unknowns, strict=True))
        unknowns.insert(0, (rows[i][-1] - known) / rows[i][i])
    return unknowns
