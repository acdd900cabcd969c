"""How many lines of batches an engine may be sent beside calls for which somebody waits.

A line's prompt delays first tokens, so none is sent while a prompt of another call is uncomputed. Its decodes lengthen
all others', so few run at once. Where nobody has called for a while, lines have all slots but one. Even then they leave
KV for the first calls that come, and an engine that serves calls as they come has few of their prompts before those.
"""

from __future__ import annotations

from math import inf
from typing import Final

from plait.policy.costs.engine_view import EngineView
from plait.policy.order import ONLINE_S

DECODES: Final = 0.03
"""How much longer iterations may take because lines decode, in shortest iterations. The busier an engine is, the longer
they are, and the more is lost by a share of their time.
"""

SLOTS: Final = 64
"""Of an engine that does not say how many calls it runs."""

KEPT: Final = 0.1
"""The part of the KV that lines leave, at least."""

KEPT_S: Final = 300.0
"""They leave what other calls used in about this time, at least."""

AHEAD_S: Final = 0.5
"""An engine that serves calls as they come has at most about this many seconds of lines' prompts to compute."""


class SpareRoom:
    """The room of one engine for this gateway's lines."""

    def __init__(self, view: EngineView) -> None:
        self.lines = 0
        self.view = view
        self._tokens = 0.0  # of the lines that run: new ones, and those of their answers
        self._computed_s = -inf  # when the prompts of the lines are computed, about
        self._peaks = [0.0, 0.0]  # the most KV that others used, in the last half of `KEPT_S` and in the half before
        self._turns_s = -inf

    def has(self, tokens: float, kv_tokens: int | None, now_s: float) -> bool:
        """Whether the engine may be sent a line with about so many new tokens now.

        `kv_tokens` is the size of the engine's KV; None: not known, and then it bounds nothing.
        """
        view = self.view
        self._watch(now_s)
        on_their_way = max(0, self.lines - (view.lines - view.reported_lines))
        if spare_lines(view, tokens, now_s) <= on_their_way:
            return False
        if not view.urgent_first and self._computed_s - now_s > AHEAD_S:
            return False
        if kv_tokens is None or not (view.calls or self.lines):
            return True
        reported = view.line_tokens * view.reported_lines / max(1, view.lines)
        kept = max(KEPT * kv_tokens, *self._peaks)
        return self._tokens + reported + self._needs(tokens) + kept <= kv_tokens

    def sent(self, tokens: float, now_s: float) -> float:
        """A line was sent. Returns the tokens to give to `ended`."""
        needed = self._needs(tokens)
        prefill_s = self.view.slowness * self.view.cost_model.added_s(round(tokens), 0)[0]
        self.lines, self._tokens = self.lines + 1, self._tokens + needed
        self._computed_s = max(now_s, self._computed_s) + prefill_s
        return needed

    def ended(self, needed: float) -> None:
        self.lines -= 1
        self._tokens = self._tokens - needed if self.lines else 0.0

    def _needs(self, tokens: float) -> float:
        return tokens + self.view.ledger.mean_output_tokens

    def _watch(self, now_s: float) -> None:
        """Note what other calls use."""
        if now_s >= self._turns_s:
            self._peaks = [0.0, self._peaks[0] if now_s < self._turns_s + KEPT_S / 2 else 0.0]
            self._turns_s = now_s + KEPT_S / 2
        self._peaks[0] = max(self._peaks[0], self.view.context_tokens - self.view.line_tokens)


def spare_lines(view: EngineView, tokens: float, now_s: float) -> int:
    """How many lines with about so many new tokens the engine may be sent now, at most."""
    others = view.calls - view.lines
    if others <= 0 and now_s - view.online_s > ONLINE_S:
        return max(0, (view.slots or SLOTS) - 1 - view.calls)
    if len(view.queue) or not (view.urgent_first or view.is_small(round(tokens), 0)):
        return 0
    costs, calls = view.cost_model, max(1, others)
    without_s = costs.decode_iteration_s(calls, view.context_tokens - view.line_tokens)
    with_s = costs.decode_iteration_s(calls + view.lines + 1, view.context_tokens + tokens)
    return int(with_s - without_s <= DECODES * costs.decode_iteration_s(1, 0))
