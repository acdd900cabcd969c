"""The places of calls whose clients could not be kept waiting: one that asks again gets its old place."""

from __future__ import annotations

from typing import Final

from plait.gateway.admission.waiting import Waiting

GRACE_S: Final = 10.0
"""A place is kept so much longer than the client was told to stay away."""

MOST: Final = 10_000
"""So many places are kept. Beyond, the oldest are given up."""


class KeptPlaces:
    """The numbers of calls that have left and may come back."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[int, float]] = {}  # number and time of expiry, by the call

    def keep(self, call: Waiting, until_s: float) -> None:
        """The call has left. Its client may come back until some seconds after this time."""
        if len(self._kept) >= MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[_same(call)] = call.number, until_s + GRACE_S

    def take(self, call: Waiting, now_s: float) -> int | None:
        """The number of the call when it came first; None if it has not been here, or too long ago."""
        number, until_s = self._kept.pop(_same(call), (None, 0.0)) if self._kept else (None, 0.0)
        return number if now_s <= until_s else None


def _same(call: Waiting) -> tuple[object, ...]:
    """What is equal for a call that is sent again."""
    asked = call.call
    last = asked.block_hashes[-1] if len(asked.block_hashes) else None
    return call.tenant, asked.model, asked.prompt_tokens, asked.output_limit, asked.prompt_hash, last
