"""What answers tell of the cache of an engine that makes no reports, to correct its estimate.

In: for each answered prompt, how far the estimate reached and what the engine found. Out:

- `fraction`: the part of the assumed size that the engine seems to have. A small one has many causes: layers with
  windows or states, which take several blocks for a token; other clients; a restart;
- `expected`: how much of a reach is found. An engine with windows or states keeps what a hit needs at some places only,
  and without caching nothing is found anywhere.

Predictions are the expected tokens. Placement counts on the whole reach: with the expected tokens, calls would leave
the engine of their prefix as soon as hits are rare, which makes them rarer. On two engines with windows, half as many
tokens were found.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

TELLING: Final = 4
"""Fewer blocks say little: the sizes of blocks differ, and a prompt may not be computed yet."""

LATEST: Final = 0.1
"""The least weight of the latest answer in a share that is found. The first ones weigh more."""

FORGOTTEN: Final = 0.01
"""By this part, an answer that found all makes up for misses of a kind that does not occur any more."""

ALL: Final = 0.9
"""A larger share counts as all, because single exceptions occur on any engine, and a smaller one as its part of this:
hits that the estimate does not reach make up for it.
"""

MOST: Final = 4.0
"""The largest `fraction` of a size that is only assumed."""

MANY: Final = 8
"""An engine that has found none of so many prompts again is taken to cache nothing."""

MOST_STEP, LEAST_STEP = 1.0, 0.1
"""The size changes by a factor of 2 to this power: more while answers agree, less once they contradict each other."""


class Reach(NamedTuple):
    """Leading blocks of a prompt in an estimated cache, by the least `Holding.seam` of the places where a hit can end.

    See `Residency.reach`.
    """

    anywhere: int
    passed: int
    found: int
    known: int
    """The leading blocks that earlier prompts on the engine had."""


class LearnedCache:
    def __init__(self) -> None:
        self.fraction = 1.0
        self.is_sure = True
        """Whether all that the estimate reaches is expected to be found. Then no reach is needed."""
        self.agreed = 0
        """Answers that found what was predicted while `is_sure`."""
        self.shares = [1.0, 1.0, 1.0]
        """By seam: what was found lately of the blocks up to there, after the surer places."""
        self._seen = [0, 0, 0]  # answers in each share
        self._missed: float = 0  # prompts that were not found, until the first is
        self._step = MOST_STEP
        self._grew = False
        self._changed_s = -inf

    @property
    def finds_nothing(self) -> bool:
        """Whether no prompt was ever found again, of many."""
        return self._missed >= MANY

    def expected(self, reach: Reach) -> int:
        """The blocks of a reach that are expected to be found."""
        if self.finds_nothing:
            return 0
        anywhere, passed, found, _ = reach
        parts = zip(self.shares, (anywhere - passed, passed - found, found), strict=True)
        return round(sum(blocks * min(1.0, share / ALL) for share, blocks in parts))

    def saw(
        self, reach: Reach, found: float, size: int, booked_s: float, now_s: float, *, is_bound: bool = True
    ) -> None:
        """The engine found these blocks of a prompt that was placed at `booked_s`.

        The assumed size is `size` blocks. `is_bound`: the engine or the configuration gives it.
        """
        surer = 0
        for seam in (2, 1, 0):
            blocks = reach[seam] - surer
            if blocks >= TELLING:
                share = min(1.0, max(0.0, (found - surer) / blocks))
                weight = max(LATEST, 1 / (2 + self.agreed + self._seen[seam]))
                self.shares[seam] += weight * (share - self.shares[seam])
                self._seen[seam] += 1
            elif reach.anywhere >= TELLING and found >= reach.anywhere - TELLING:
                self.shares[seam] += FORGOTTEN * (1.0 - self.shares[seam])
            surer = reach[seam]
        self.is_sure = min(self.shares) >= ALL
        if found >= TELLING:
            self._missed = -inf
        elif reach.anywhere >= TELLING:
            self._missed += 1
        if booked_s < self._changed_s:
            return  # the reason may be that of the latest change
        grows = found >= reach.anywhere + TELLING
        if grows or (found < reach.found / 2 and reach.found >= TELLING):
            self._step = min(MOST_STEP, 1.5 * self._step) if grows is self._grew else max(LEAST_STEP, self._step / 2)
            self._grew, self._changed_s = grows, now_s
            known = max(self.fraction, found / max(1, size))
            self.fraction = min(1.0 if is_bound else MOST, known * 2 ** (self._step if grows else -self._step))
