"""The cached tokens of prompts, from the sums in an engine's metrics: stock vLLM's answers do not tell them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from plait.gateway.fleet.booking import Booking, BookingState

ENOUGH: Final = 0.9
"""A prompt is covered from this part of its tokens on: engines may count fewer than the gateway."""


class LookupSums:
    """Divides what an engine has looked up and found among the calls that it was sent.

    vLLM sums a prompt when it looks it up, about in the order of sending, and SGLang when its call ends. So the oldest
    calls are those that the sums cover, or those that have ended. Other clients' prompts are in the sums, too, and are
    taken to find the same share. The sums say less than answers do.
    """

    def __init__(self) -> None:
        self.open: deque[Booking] = deque()
        """The sent calls that no sum covers so far, the oldest first."""
        self._looked_up = self._found = 0.0

    def grew(self, looked_up: float, found: float) -> Iterator[tuple[Booking, float]]:
        """The sums have grown by these tokens. Yields the calls that are covered from now on, with their tokens found.

        Where several calls are covered at a time, those with the largest predictions are taken to have found the most.
        """
        self._looked_up += looked_up
        self._found += found
        covered, covered_tokens, left = [], 0, self._looked_up
        while self.open and (self.open[0].state is BookingState.SETTLED or _tokens(self.open[0]) * ENOUGH <= left):
            covered.append(self.open.popleft())
            covered_tokens += _tokens(covered[-1])
            left = max(0.0, left - _tokens(covered[-1]))
        if covered:
            found = self._found * min(1.0, covered_tokens / max(1.0, self._looked_up))
            yield from _shares(covered, found).items()
            self._found = 0.0
        self._looked_up = left
        if not self.open:
            self._looked_up = self._found = 0.0


def _tokens(call: Booking) -> int:
    return call.call.prompt_tokens


def _shares(calls: Sequence[Booking], found: float) -> dict[Booking, float]:
    """What each call found: what is known of its prompt, those with the largest predictions first, and then more."""
    shares = dict.fromkeys(calls, 0.0)
    for is_known in (True, False):
        for call in sorted(calls, key=lambda call: -call.placement.cached_tokens):
            known = call.placement.cached_tokens if call.reach is None else call.reach.known * call.call.block_tokens
            more = min(found, (known if is_known else _tokens(call)) - shares[call])
            shares[call] += more
            found -= more
    return shares
