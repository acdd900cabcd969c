"""A model of how long an engine's iterations take: a profile, and three numbers that are learned beside it.

The engine may be another than the profile's, slower or faster, and may take a while for any iteration with a prompt. So
the observed iterations tell a factor on the times of decodes alone, one on the times of iterations with prompts, and a
step: the least time of an iteration with prompts. The sizes of calls stay the profile's part, so few iterations of any
size are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import Final

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear, Pivot
from plait.policy.scheduling.plan import IterationWork

USUAL: Final = CostModel(
    PiecewiseLinear(((1, 4.9e-3), (160, 6.7e-3)), 2.27e-5),
    context_constant_s=0.0,
    context_s=2.9e-8,
    context_floor_s=0.0,
    long_attention=LongAttention(product_s=8.7e-10),
)
"""The model of an engine without a profile: a dense model of 8 billion parameters on an H200 (`h200-llama-8b`). Other
models and accelerators have other times, in about the same proportions.
"""

MEMORY: Final = 64
"""Ours: so many of the latest iterations count, both of decodes alone and with prompts."""

MIN_ITERATIONS: Final = 8
"""Ours: an engine without a profile is known after so many iterations with prompts. After so many iterations of any
kind, the numbers are learned anew.
"""

CLEAR: Final = 1.1
"""Ours: times that differ by less than this factor may be equal, because iterations vary."""

MOST_JITTER: Final = 0.1
"""Ours: more of an iteration's time is not allowed for, because a model that is as wrong shows nothing of jitter."""

LEAST: Final = 3
"""Ours: a median is taken over at least so many iterations. Then one that waited for something shows nothing."""

Observed = tuple[float, float]
"""An iteration's seconds by the profile, and as it was."""


class IterationModel:
    """The engine's cost model and its pivot. Both are None until they are known."""

    def __init__(self) -> None:
        self._profile = USUAL
        self._is_given = False
        self._decodes: deque[Observed] = deque(maxlen=MEMORY)
        self._prompts: deque[Observed] = deque(maxlen=MEMORY)
        self._costs: CostModel | None = None
        self._pivot: Pivot | None = None
        self._prompts_factor = 1.0
        self.jitter = 0.0
        """Nine of ten recent iterations were off by at most this share of their time."""
        self._unlearned = 0
        """Iterations that the numbers do not know. They are learned only when a plan needs them."""

    @property
    def costs(self) -> CostModel | None:
        if self._unlearned >= MIN_ITERATIONS and (self._is_given or len(self._prompts) >= MIN_ITERATIONS):
            self._unlearned = 0
            self._costs = self._learned()
            self._pivot = self._costs.pivot()
        return self._costs

    @property
    def pivot(self) -> Pivot | None:
        """The pivot forward size: S_pf tokens in T_pf seconds. None while it is not known."""
        return self._pivot if self.costs else None

    def expect(self, costs: CostModel) -> None:
        """Start from this model."""
        self._profile, self._is_given = replace(costs, step_s=0.0), True
        self._costs, self._pivot = costs, costs.pivot()

    def on_iteration(self, duration_s: float, work: IterationWork) -> None:
        profile_s = time_s(self._profile, work)
        if profile_s > 0 and duration_s > 0:
            (self._prompts if work.chunks else self._decodes).append((profile_s, duration_s))
            self._unlearned += 1

    def _learned(self) -> CostModel:
        by_size, prompts_factor = sorted(self._prompts), self._prompts_factor
        step_s = self._costs.step_s if self._costs else 0.0
        if len(by_size) >= MIN_ITERATIONS:
            small = by_size[: max(LEAST, len(by_size) // 8)]
            large = by_size[-max(LEAST, len(by_size) // 4) :]
            prompts_factor, step_s = _factor(large), median(duration_s for _, duration_s in small)
            if median(duration_s for _, duration_s in large) < CLEAR * step_s and small[0][0] * CLEAR < large[-1][0]:
                # All lasted as long, whatever their size: none of them can show how size counts.
                prompts_factor = min(prompts_factor, self._prompts_factor)
            if step_s < CLEAR * prompts_factor * median(profile_s for profile_s, _ in small):
                step_s = 0.0
            self._prompts_factor = prompts_factor
        # An engine that hardly ever decodes alone is taken to decode as much slower than its profile as it prefills.
        decodes_factor = _factor(self._decodes) if len(self._decodes) >= LEAST else prompts_factor
        off = [abs(duration_s / (decodes_factor * profile_s) - 1) for profile_s, duration_s in self._decodes]
        off += [abs(duration_s / max(step_s, prompts_factor * profile_s) - 1) for profile_s, duration_s in by_size]
        self.jitter = min(MOST_JITTER, sorted(off)[len(off) * 9 // 10])
        return scaled(self._profile, decodes_factor, prompts_factor, step_s)


def _factor(observed: Iterable[Observed]) -> float:
    """How much longer iterations last than by the profile."""
    return median(duration_s / profile_s for profile_s, duration_s in observed)


def time_s(costs: CostModel, work: IterationWork) -> float:
    """How long an iteration takes."""
    return costs.batch_time_s(work.new_tokens, work.sequence_tokens, work.chunks)


def scaled(costs: CostModel, decodes: float, prompts: float, step_s: float) -> CostModel:
    """The model with its times multiplied, and with this step."""
    long = costs.long_attention
    return replace(
        costs,
        forward=costs.forward.scaled(decodes),
        context_constant_s=costs.context_constant_s * decodes,
        context_s=costs.context_s * decodes,
        context_floor_s=costs.context_floor_s * decodes,
        long_attention=LongAttention(
            long.threshold, long.new_s * prompts, long.sequence_s * prompts, long.product_s * prompts
        ),
        with_prompts=costs.prompts.scaled(prompts),
        step_s=step_s,
    )
