"""The output tokens that a call of a task group is expected to generate: from them follows the group's common JCT.

The calls of one group do much the same, and unlike chats they are often many and short. So the outputs of other calls
say nothing of them.
"""

from __future__ import annotations

from typing import Final

RECENT_CALLS: Final = 128
"""Ours: a call counts for about as long as so many further calls end."""


class GroupOutputs:
    """The mean output of task groups' calls, by model, in tokens. `prior_tokens` is expected where nothing is known."""

    def __init__(self, prior_tokens: float) -> None:
        self._prior_tokens = prior_tokens
        self._means: dict[str, tuple[int, float]] = {}
        """The number of calls that count, and their mean output."""

    def ended(self, model: str, output_tokens: int) -> None:
        """A call of a task group has generated so much."""
        calls, mean_tokens = self._means.get(model, (0, 0.0))
        calls = min(calls + 1, RECENT_CALLS)
        self._means[model] = calls, mean_tokens + (output_tokens - mean_tokens) / calls

    def expected_tokens(self, model: str, limit: int | None) -> float:
        """What a call with this output limit (None: no limit) is expected to generate.

        Until a task group's call has ended, that is the limit.
        """
        if model not in self._means:
            return self._prior_tokens if limit is None else limit
        mean_tokens = self._means[model][1]
        return mean_tokens if limit is None else min(mean_tokens, limit)
