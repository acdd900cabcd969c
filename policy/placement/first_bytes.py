"""How fast an engine really comes to first bytes, whatever holds it up: prompts, decodes or a full KV cache."""

from __future__ import annotations

from math import inf

RECENT = 0.1
"""What one gap counts in the mean. An iteration brings several first bytes at once, so single gaps say little."""


class FirstBytes:
    """`gap_s` is the mean time to the next first byte while a call waits for its own; 0: not known yet."""

    __slots__ = ("_latest_s", "gap_s")

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._latest_s = -inf

    def came(self, sent_s: float, now_s: float) -> None:
        """A call that was sent at `sent_s` has its first byte."""
        gap_s = now_s - max(sent_s, self._latest_s)
        self.gap_s = self.gap_s + RECENT * (gap_s - self.gap_s) if self.gap_s else gap_s
        self._latest_s = now_s
