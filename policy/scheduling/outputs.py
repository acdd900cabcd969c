"""The outputs of recently ended calls, which predict how many tokens the running calls still generate."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Objective

START_OUTPUT_TOKENS = 211
"""A class has one output of this length until a call of it has ended: the mean of the Azure conversation trace (2023).
"""

LONGEST_PART = 5
"""Ours: predictions leave out the longest fifth of the outputs. A call among these generates more than predicted."""

LEAST_OUTPUT_TOKENS = 32
"""Ours: the further tokens predicted for a call that is longer than the mean, or than all recent outputs."""

RECENT_OUTPUTS = 1024
"""Ours: this many of the latest outputs of a class count."""

CallClass = tuple[Objective | None, bool]
"""(Objective, whether the call has a JCT). Calls of task groups have one; other calls with a deduced SLO have none."""


def class_of(call: LocalCall) -> CallClass:
    slo = call.slo
    return call.objective, slo is not None and slo.jct_s is not None


class Outputs(NamedTuple):
    """The recent outputs of a class, in tokens: all of them, at least one, `ascending`, and S_g, their mean."""

    ascending: tuple[int, ...]
    mean_tokens: float

    def to_come(self, generated: int) -> int:
        """The further tokens to allow for after the first `generated`, at least 1: all but the longest fifth of the
        outputs that are longer than `generated` end within them.
        """
        ascending = self.ascending
        longer = len(ascending) - bisect_right(ascending, generated)
        return ascending[-1 - longer // LONGEST_PART] - generated if longer else LEAST_OUTPUT_TOKENS


START_OUTPUTS = Outputs((START_OUTPUT_TOKENS,), START_OUTPUT_TOKENS)


class RecentOutputs:
    def __init__(self) -> None:
        self._latest: dict[CallClass, deque[int]] = {}
        self._ascending: dict[CallClass, list[int]] = {}
        self._by_class: Mapping[CallClass, Outputs] = {}

    @property
    def by_class(self) -> Mapping[CallClass, Outputs]:
        """The outputs of each class with an ended call. Each change makes a new mapping, so a plan may keep the old."""
        return self._by_class

    def on_ended(self, calls: Iterable[LocalCall]) -> None:
        changed = {}
        for call in calls:
            kind = class_of(call)
            latest, ascending = self._latest.setdefault(kind, deque()), self._ascending.setdefault(kind, [])
            tokens = max(1, call.output_tokens)
            latest.append(tokens)
            insort(ascending, tokens)
            if len(latest) > RECENT_OUTPUTS:
                del ascending[bisect_left(ascending, latest.popleft())]
            changed[kind] = ascending
        if changed:
            new = {kind: Outputs(tuple(some), sum(some) / len(some)) for kind, some in changed.items()}
            self._by_class = {**self._by_class, **new}
