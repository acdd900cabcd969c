"""How far an engine has come with decoding: how many tokens one more call of a model would have got.

A stream that its engine has forgotten is told from one that a tool parser holds back by this clock. Each answer shows,
for the time from its sending to its end, that every call of its model could get as many tokens, because all running
calls get one in an iteration. Answers that overlap count once. Calls with objectives do not count: a scheduler may
favour them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from plait.policy.types import Call, Objective

MOST_APART_S: Final = 20.0
"""Trials of a quiet engine come every `hang_timeout_s` (8 s). The time between two that are further apart may have been
another's.
"""


class _Reading(msgspec.Struct):
    tokens: float = 0.0
    until_s: float = 0.0
    """The time until which answers have been counted."""

    tried_s: float | None = None
    """The end of the latest trial."""


class DecodeClock:
    """The clock of one engine. `tokens` only grows."""

    def __init__(self) -> None:
        self._models: dict[str, _Reading] = {}

    def tokens(self, model: str) -> float:
        """What a call of the model that has run all the time would have got."""
        reading = self._models.get(model)
        return 0.0 if reading is None else reading.tokens

    def answered(self, call: Call, tokens: int, sent_s: float, now_s: float) -> None:
        """An answer to a call that was sent at `sent_s` is whole. Each of its choices has about so many tokens."""
        reading = self._models.get(call.model)
        if reading is None:
            reading = self._models[call.model] = _Reading()
        if sent_s >= reading.until_s and tokens > 1 and is_plain(call) and call.priority >= 0:
            reading.tokens += tokens
            reading.until_s = now_s

    def tried(self, model: str, tokens: int, begun_s: float, now_s: float) -> None:
        """A trial of a quiet engine has passed. Since the one before, the engine had as little to do."""
        reading = self._models.setdefault(model, _Reading())
        if reading.tried_s is not None and now_s - reading.tried_s <= MOST_APART_S:
            idle_s = now_s - max(reading.until_s, reading.tried_s)
            reading.tokens += max(0.0, idle_s) * tokens / max(1e-3, now_s - begun_s)
            reading.until_s = max(reading.until_s, now_s)
        reading.tried_s = now_s


def is_plain(call: Call) -> bool:
    """Whether no objective says when the call is to be served."""
    return call.slo is None and call.objective is None


def may_starve(call: Call) -> bool:
    """Whether a scheduler may let others go on before this call."""
    return call.priority > 0 or call.objective is Objective.THROUGHPUT
