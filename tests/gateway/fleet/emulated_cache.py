"""The prefix cache of a stock engine, and calls that a router places on it one after the other, two at a time."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from plait.backends.protocol.engine_counts import EngineCounts
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Call
from tests.gateway.fleet.lettered_prompts import new_router

BLOCK = 64


class EmulatedCache:
    """LRU of `size` blocks. With `has_windows`, a hit ends only where a prompt has ended or a further one branched off.

    `size` 0: caching is off.
    """

    def __init__(self, size: int, *, has_windows: bool = False) -> None:
        self.size = size
        self._has_windows = has_windows
        self._blocks: OrderedDict[int, bool] = OrderedDict()  # whether a hit can end there, the oldest first

    def look_up(self, hashes: Sequence[int]) -> int:
        """The blocks found of a prompt, which is computed and stored then."""
        known = next((at for at, block in enumerate(hashes) if block not in self._blocks), len(hashes))
        found = known
        if self._has_windows:
            found = max((at + 1 for at in range(known) if self._blocks[hashes[at]]), default=0)
        for at in reversed(range(len(hashes))):
            can_end = self._blocks.pop(hashes[at], False)
            self._blocks[hashes[at]] = can_end or at + 1 in {known, len(hashes)}
        while len(self._blocks) > self.size:
            self._blocks.popitem(last=False)
        return found

    def clear(self) -> None:
        self._blocks.clear()


class Traffic:
    """Calls through a router to one engine that makes no reports.

    `found` and `predicted` have the tokens of each call. With `sums`, the engine tells them in its metrics only.
    """

    def __init__(self, cache: EmulatedCache, told: int, *, sums: bool = False) -> None:
        self.router: Router = new_router("a", kv_tokens=told * BLOCK)
        self.router.no_reports("a")
        self.cache = cache
        self.prompts, self.predicted, self.found = list[int](), list[int](), list[int]()
        self._sums = sums
        self.counted_part = 1.0
        """How many tokens the engine counts for each of the gateway's."""
        self.others_factor = 1
        """The prompts in the sums for each of the gateway's; the others find the same."""
        self.tells_once = False
        """The next answer tells its cached tokens, although the engine sums."""
        self._looked_up = self._hits = 0
        self._open: list[tuple[Booking, int]] = []
        self._times = count()

    def send(self, tokens: Sequence[int]) -> None:
        """Send a call, and answer the one before."""
        now_s = float(next(self._times))
        self.router.age(now_s)
        call = Call(str(now_s), "m", len(tokens), BLOCK, chain(tokens, BLOCK, root_hash("m")))
        placement = self.router.select(call, now_s)
        booking = self.router.book(call, placement, now_s)
        found = BLOCK * min(call.cacheable_blocks, self.cache.look_up(call.block_hashes))
        self._open.append((booking, found))
        self.prompts.append(len(tokens))
        self.predicted.append(booking.placement.cached_tokens)
        self.found.append(found)
        self._looked_up, self._hits = self._looked_up + len(tokens), self._hits + found
        if self._sums:
            factor = self.others_factor * self.counted_part
            counts = EngineCounts(1, 0, None, 0.0, None, factor * self._looked_up, factor * self._hits)
            self.router.counted("a", counts, now_s)
        if len(self._open) > 1:
            answered, was_found = self._open.pop(0)
            self.router.first_token(answered, now_s)
            usage = CallUsage(answered.call.prompt_tokens, 8, was_found if self.tells_once or not self._sums else None)
            self.tells_once = False
            self.router.settle(answered, usage, now_s)

    def share_off(self, first: int = 100) -> float:
        """The share of later calls whose prediction is wrong by more than half of the prompt."""
        calls = list(zip(self.prompts, self.predicted, self.found, strict=True))[first:]
        return sum(abs(predicted - found) > tokens / 2 for tokens, predicted, found in calls) / len(calls)

    def shares(self, first: int = 100) -> tuple[float, float]:
        """(predicted share of the later calls' tokens, found share)."""
        tokens = sum(self.prompts[first:])
        return sum(self.predicted[first:]) / tokens, sum(self.found[first:]) / tokens


def questions(prefixes: int, calls: int, seed: int, prefix_blocks: int = 25) -> Iterator[list[int]]:
    """Prompts about one of some prefixes, with a question of one to three blocks."""
    rng = random.Random(seed)
    shared = [[rng.randrange(30_000) for _ in range(prefix_blocks * BLOCK)] for _ in range(prefixes)]
    for _ in range(calls):
        yield rng.choice(shared) + [rng.randrange(30_000) for _ in range(rng.randint(BLOCK, 3 * BLOCK))]


def run(traffic: Traffic, prompts: Iterator[list[int]], between: Callable[[int], None] = lambda _number: None) -> None:
    """Send the prompts; `between` is called with the number of each before it."""
    for number, prompt in enumerate(prompts):
        between(number)
        traffic.send(prompt)
