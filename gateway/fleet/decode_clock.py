"""A clock in tokens: how many tokens an engine would have decoded so far for one more call of a model.

The clock tells a forgotten stream from one that a tool parser holds back. Every running call gets a token in each
iteration. So an answer of n tokens shows that any other call of its model could get n tokens in the same time. Answers
that overlap in time count once. Answers to calls with objectives do not count, because a scheduler may favour them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from plait.policy.types import Call, Objective

MOST_APART_S: Final = 20.0
"""Trials of a quiet engine come every `hang_timeout_s` (8 s). Two that are further apart do not belong together."""


class _Reading(msgspec.Struct):
    tokens: float = 0.0
    until_s: float = 0.0
    """The end of the latest answer or time between trials that was counted."""

    tried_s: float | None = None
    """The end of the latest trial."""


class DecodeClock:
    """The clock of one engine. `tokens` only grows."""

    def __init__(self) -> None:
        self._models: dict[str, _Reading] = {}

    def tokens(self, model: str) -> float:
        """The clock of a model."""
        reading = self._models.get(model)
        return 0.0 if reading is None else reading.tokens

    def answered(self, call: Call, tokens: int, sent_s: float, now_s: float) -> None:
        """An answer is complete. Each of its choices has about `tokens`."""
        reading = self._models.get(call.model)
        if reading is None:
            reading = self._models[call.model] = _Reading()
        if sent_s >= reading.until_s and tokens > 1 and is_plain(call) and call.priority >= 0:
            reading.tokens += tokens
            reading.until_s = now_s

    def tried(self, model: str, tokens: int, begun_s: float, now_s: float) -> None:
        """A trial of a quiet engine has passed: the clock ran at the trial's pace since the trial before."""
        reading = self._models.setdefault(model, _Reading())
        if reading.tried_s is not None and now_s - reading.tried_s <= MOST_APART_S:
            idle_s = now_s - max(reading.until_s, reading.tried_s)
            reading.tokens += max(0.0, idle_s) * tokens / max(1e-3, now_s - begun_s)
            reading.until_s = max(reading.until_s, now_s)
        reading.tried_s = now_s


def is_plain(call: Call) -> bool:
    """Whether the call has no objective by which a scheduler could favour it."""
    return call.slo is None and call.objective is None


def may_starve(call: Call) -> bool:
    """Whether a scheduler may serve other running calls before this one."""
    return call.priority > 0 or call.objective is Objective.THROUGHPUT
