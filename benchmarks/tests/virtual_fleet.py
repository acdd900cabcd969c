"""A router with engines that serve one call after the other, in virtual time. An engine has room for every prefix."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from benchmarks.placing.rebalancing import RebalancedE2, rebalanced_e2
from benchmarks.placing.routes import Route
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Call

BLOCK_TOKENS = 64
COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
"""10 ms a pass and 1 ms a new token: a block takes 64 ms, a pass of decoding 11 ms."""


@dataclass(frozen=True)
class Sent:
    """Where a call went."""

    at_s: float
    prompt: str
    engine: str
    reason: str
    missed_tokens: int


class VirtualFleet:
    """Engines named by single letters. A prompt has a block for each letter. Each answer has one token."""

    def __init__(self, engines: str, mechanisms: Iterable[str] = ("decode_balance", "shift", "replicate")) -> None:
        self.rebalanced: RebalancedE2 = rebalanced_e2(tuple(mechanisms), BLOCK_TOKENS)
        self.router = Router(self.rebalanced.policy)
        for engine in engines:
            self.router.add_engine(engine, COSTS)
            self.router.health.answered(engine, {"m": None})
            self.router.no_reports(engine)
        self.sent: list[Sent] = []
        self.routes: list[tuple[float, list[Route]]] = []
        self._free_s: defaultdict[str, float] = defaultdict(float)
        self._running: list[tuple[float, int, Booking]] = []
        self._order = count()
        self._aged_s = 0.0

    def run(self, arrivals: Iterable[tuple[float, str]]) -> None:
        """Send prompts at their times, in order."""
        for at_s, prompt in arrivals:
            self.advance(at_s)
            self._send(prompt, at_s)

    def advance(self, to_s: float) -> None:
        """Let time pass: calls end, and the router ages once a second."""
        while self._aged_s + 1.0 <= to_s:
            self._aged_s += 1.0
            self._end(self._aged_s)
            self.router.age(self._aged_s)
            self.routes.append((self._aged_s, [route for _, route in self.rebalanced.routes]))
        self._end(to_s)

    def changes(self) -> list[float]:
        """When routes began or ended."""
        states = [((), 0.0), *((tuple(routes), at_s) for at_s, routes in self.routes)]
        return [at_s for (before, _), (after, at_s) in pairwise(states) if before != after]

    def reasons(self, prefix: str, from_s: float, to_s: float) -> set[tuple[str, str]]:
        """The engines and reasons of a prefix's calls between two times."""
        return {
            (one.engine, one.reason) for one in self.sent if from_s <= one.at_s < to_s and one.prompt.startswith(prefix)
        }

    def hashes(self, prompt: str) -> Sequence[int]:
        """The prompt's blocks."""
        return chain([ord(letter) for letter in prompt], 1, root_hash("m"))

    def _send(self, prompt: str, now_s: float) -> None:
        tokens = BLOCK_TOKENS * len(prompt) + 1
        call = Call(f"call-{next(self._order)}", "m", tokens, BLOCK_TOKENS, self.hashes(prompt))
        placement = self.router.select(call, now_s)
        booking = self.router.book(call, placement, now_s)
        engine = placement.engine_id
        self.sent.append(Sent(now_s, prompt, engine, placement.reason, placement.missed_tokens))
        ends_s = max(now_s, self._free_s[engine]) + COSTS.prefill_time_s(placement.missed_tokens)
        self._free_s[engine] = ends_s
        heapq.heappush(self._running, (ends_s, next(self._order), booking))

    def _end(self, now_s: float) -> None:
        while self._running and self._running[0][0] <= now_s:
            ends_s, _, booking = heapq.heappop(self._running)
            self.router.first_token(booking, ends_s)
            usage = CallUsage(booking.call.prompt_tokens, 1, booking.placement.cached_tokens)
            self.router.settle(booking, usage, ends_s)
