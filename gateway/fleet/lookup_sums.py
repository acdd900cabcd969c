"""The cached tokens of prompts, from the sums in an engine's metrics: stock vLLM's answers do not tell them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from plait.gateway.fleet.booking import Booking


class LookupSums:
    """Divides what an engine has looked up and found among the calls that it was sent.

    Engines look prompts up about in the order in which they were sent. So the oldest calls are those that the sum of
    looked-up tokens covers. Other clients' prompts are in the sums, too, until no sent call is open.
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
        covered = []
        while self.open and self.open[0].call.prompt_tokens <= self._looked_up:
            covered.append(self.open.popleft())
            self._looked_up -= covered[-1].call.prompt_tokens
        if covered:
            yield from _shares(covered, self._found).items()
            self._found = 0.0
        if not self.open:
            self._looked_up = self._found = 0.0


def _shares(calls: Sequence[Booking], found: float) -> dict[Booking, float]:
    """What each call found. The calls with the largest predictions found what is known of their prompts."""
    shares, left = dict.fromkeys(calls, 0.0), found
    known = {
        call: call.placement.cached_tokens if call.reach is None else call.reach.known * call.call.block_tokens
        for call in calls
    }
    for most in (known, {call: call.call.prompt_tokens for call in calls}):
        for call in sorted(calls, key=lambda call: -call.placement.cached_tokens):
            more = min(left, most[call] - shares[call])
            shares[call] += more
            left -= more
    return shares
