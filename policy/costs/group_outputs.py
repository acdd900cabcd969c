"""The expected output tokens of a task group's calls, from which the group's common JCT follows.

The calls of a group do much the same, and are often many and short. So the outputs of other calls predict nothing.
"""

from __future__ import annotations

from typing import Final

RECENT_CALLS: Final = 128
"""Ours: the mean is over about this many of the latest calls."""


class GroupOutputs:
    """The mean output of task groups' calls, by model, in tokens.

    `prior_tokens` is expected of a call without an output limit before any call of its model has ended.
    """

    def __init__(self, prior_tokens: float) -> None:
        self._prior_tokens = prior_tokens
        self._means: dict[str, tuple[int, float]] = {}
        """By model: (calls in the mean, mean output)."""

    def ended(self, model: str, output_tokens: int) -> None:
        """A call of a task group has ended."""
        calls, mean_tokens = self._means.get(model, (0, 0.0))
        calls = min(calls + 1, RECENT_CALLS)
        self._means[model] = calls, mean_tokens + (output_tokens - mean_tokens) / calls

    def expected_tokens(self, model: str, limit: int | None) -> float:
        """The expected output of a call: at most its `limit` (None: no limit), which counts until a call has ended."""
        if model not in self._means:
            return self._prior_tokens if limit is None else limit
        mean_tokens = self._means[model][1]
        return mean_tokens if limit is None else min(mean_tokens, limit)
