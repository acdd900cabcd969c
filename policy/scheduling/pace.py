"""An engine's recent speed: the figures from which remaining times are computed (AccelGen, 4.3).

In: each iteration's duration and work, and the waiting and running calls of each plan. Out: a `Pace`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.outputs import (
    LEAST_OUTPUT_TOKENS,
    START_OUTPUTS,
    CallClass,
    Outputs,
    RecentOutputs,
    class_of,
)
from plait.policy.scheduling.plan import RECENT_ITERATIONS, IterationWork, LocalCall

PREEMPTION_ITERATIONS = 1024
"""The window of P and P_max, in iterations. It is longer than `RECENT_ITERATIONS`, because preemptions are rare
(docs/design/local-scheduler.md).
"""


class PreemptionHistory:
    """P and P_max, and how often each call of the engine was preempted."""

    def __init__(self) -> None:
        self._iteration = 0
        self._generated: deque[int] = deque(maxlen=PREEMPTION_ITERATIONS)
        self._generated_tokens = 0
        self._durations_s: deque[tuple[int, float]] = deque()
        """(iteration, seconds) of each preemption that ended within the window."""
        self._running: dict[LocalCall, None] = {}
        self._preempted_s: dict[LocalCall, float] = {}
        """The time at which each currently preempted call was preempted."""
        self._times: dict[LocalCall, int] = {}

    @property
    def rate(self) -> float:
        """P: preemptions per generated token."""
        return len(self._durations_s) / max(1, self._generated_tokens)

    @property
    def longest_s(self) -> float:
        """P_max: the longest preemption in the window."""
        return max((seconds for _, seconds in self._durations_s), default=0.0)

    def times(self, call: LocalCall) -> int:
        """How often a call has been preempted."""
        return self._times.get(call, 0)

    def on_iteration(self, work: IterationWork) -> None:
        self._iteration += 1
        if len(self._generated) == PREEMPTION_ITERATIONS:
            self._generated_tokens -= self._generated[0]
        self._generated.append(work.decodes)
        self._generated_tokens += work.decodes
        while self._durations_s and self._durations_s[0][0] <= self._iteration - PREEMPTION_ITERATIONS:
            self._durations_s.popleft()

    def on_plan(self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall]) -> list[LocalCall]:
        """Find the preemptions since the last plan. Returns the calls that have left the engine since then."""
        before, self._running = self._running, dict.fromkeys(running)
        gone = [call for call in before if call not in self._running]
        if not gone and not self._preempted_s:
            return []
        still = {*gone, *self._preempted_s}.intersection(waiting)
        for call in list(self._preempted_s):
            if call in self._running:
                self._durations_s.append((self._iteration, now_s - self._preempted_s.pop(call)))
            elif call not in still:
                del self._preempted_s[call]
                gone.append(call)
        for call in gone:
            if call in still:
                self._preempted_s[call] = now_s
                self._times[call] = self.times(call) + 1
            else:
                self._times.pop(call, None)
        return [call for call in gone if call not in still]


@dataclass(frozen=True, slots=True)
class Pace:
    """The paper's figures, and `shortest_s`, which is ours."""

    longest_s: float
    """T_max: the longest recent iteration."""
    shortest_s: float
    """The time of an iteration with one token; 0: not known."""
    chunk_tokens: float
    """L_c: the mean chunk of a prompt."""
    preemption_rate: float = 0.0
    """P: preemptions per generated token."""
    longest_preemption_s: float = 0.0
    """P_max."""
    tokens_per_s: float | None = None
    """S_pf / T_pf: the throughput at the pivot; None: not known."""
    prompt_s: float = 0.0
    """The least time of an iteration with a prompt; 0: not known."""
    jitter: float = 0.0
    """As in `IterationModel`."""
    outputs: Mapping[CallClass, Outputs] = field(default_factory=dict)
    """The outputs of recent calls by class; their mean is S_g."""

    @classmethod
    def of(
        cls,
        iterations: RecentIterations,
        model: IterationModel,
        preemptions: PreemptionHistory,
        outputs: RecentOutputs,
        max_batch_tokens: int,
    ) -> Pace:
        """The figures now. Before the first iteration, T_max is T_pf and L_c is S_pf.

        While no pivot is known, S_pf is `max_batch_tokens` and T_pf is 0.
        """
        costs, pivot = model.costs, model.pivot
        default_tokens = min(pivot.tokens, max_batch_tokens) if pivot else max_batch_tokens
        return cls(
            longest_s=iterations.longest_s(pivot.time_s if pivot else 0.0),
            shortest_s=costs.iteration_time_s(((1, 0),)) if costs else 0.0,
            prompt_s=costs.prefill_time_s(2) if costs else 0.0,
            chunk_tokens=iterations.mean_chunk_tokens(float(default_tokens)),
            preemption_rate=preemptions.rate,
            longest_preemption_s=preemptions.longest_s,
            tokens_per_s=pivot.tokens / pivot.time_s if pivot and pivot.time_s > 0 else None,
            jitter=model.jitter,
            outputs=outputs.by_class,
        )

    def output_tokens(self, call: LocalCall) -> float:
        """S_g: the mean output of the calls of this call's class that ended recently."""
        return self.outputs.get(class_of(call), START_OUTPUTS).mean_tokens

    def tokens_to_come(self, call: LocalCall) -> int:
        """The further output tokens to allow for, so that the call ends in time: from 1 to the rest of its limit."""
        outputs, limit = self.outputs.get(class_of(call), START_OUTPUTS), call.max_output_tokens
        to_come = outputs.to_come(call.output_tokens)
        return to_come if limit is None else max(1, min(to_come, limit - call.output_tokens))

    def mean_tokens_to_come(self, call: LocalCall) -> float:
        """The rest of the mean output, at least `LEAST_OUTPUT_TOKENS`, at most the rest of the call's limit."""
        generated, limit = call.output_tokens, call.max_output_tokens
        to_come = max(LEAST_OUTPUT_TOKENS, self.output_tokens(call) - generated)
        return to_come if limit is None else max(1.0, min(to_come, limit - generated))

    @property
    def token_s(self) -> float:
        """The longest time for one generated token: T_max + P_max P."""
        return self.longest_s + self.longest_preemption_s * self.preemption_rate


class RecentIterations:
    """The durations of the latest iterations, and the latest chunks of prompts."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._chunks: deque[int] = deque(maxlen=RECENT_ITERATIONS)
        self._chunk_tokens = 0

    def on_iteration(self, duration_s: float, work: IterationWork) -> None:
        self._durations_s.append(duration_s)
        for chunk, _ in work.chunks:
            if len(self._chunks) == RECENT_ITERATIONS:
                self._chunk_tokens -= self._chunks[0]
            self._chunks.append(chunk)
            self._chunk_tokens += chunk

    def longest_s(self, default_s: float) -> float:
        """T_max: the longest duration; `default_s` before the first iteration."""
        return max(self._durations_s, default=default_s)

    def mean_chunk_tokens(self, default: float) -> float:
        """L_c: the mean chunk; `default` before the first chunk."""
        return self._chunk_tokens / len(self._chunks) if self._chunks else default
