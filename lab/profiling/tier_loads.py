"""Measures and fits the links of the tiers below the accelerator, from the loads that the engine reports.

Prompts of several lengths are sent, evicted from the accelerator by other prompts, and sent again one by one.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.lab.profiling.profile_fit import NOISE, non_negative_least_squares
from plait.lab.profiling.profile_plan import Limits
from plait.lab.profiling.profiler import TOKEN_IDS, ProfiledEngine
from plait.policy.costs.tier_link import TierLink

LONGEST_SHARE = 4
"""The longest prompt is the KV cache divided by this, so that all fit there together, and beside what evicts them."""

STEPS = (4, 2, 1)
"""The prompts are the longest one divided by these, so that a link's latency and time per token can be separated."""

REPORTED_WITHIN_S = 1.0
"""An engine may report a load this long after the answer. SGLang's device times loads on the side."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tokens loaded from a tier, and the seconds for which its link was busy."""

    tokens: int
    seconds: float


class TieredEngine(ProfiledEngine, Protocol):
    """An engine that reports its loads. `plait.lab.profiling.engine_probe` reaches it over HTTP."""

    async def loaded(self) -> dict[str, Loaded]:
        """The loads from each lower tier since the engine's start; empty if the engine reports none."""


class LinkProfiler:
    """Measures one engine's loads. `rng` makes the prompts. `progress` gets a line if there are tiers."""

    def __init__(
        self, engine: TieredEngine, limits: Limits, rng: random.Random, progress: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._rng = rng
        self._progress = progress
        self._loads: defaultdict[str, list[Loaded]] = defaultdict(list)

    async def measure(self, limit_s: float) -> dict[str, list[Loaded]]:
        """The loads of each tier within the time limit. Raises ValueError if the engine fails, or has other calls."""
        tiers = await self._engine.loaded()
        if not tiers:
            return {}
        begun_s = self._engine.clock()
        end = ""
        try:
            async with asyncio.timeout(limit_s):
                await self._measure()
        except TimeoutError:
            end = ": out of time"
        await self._engine.check_idle()
        counts = ", ".join(f"{len(self._loads[tier])} from {tier}" for tier in tiers)
        self._progress(f"loads: {counts} in {self._engine.clock() - begun_s:.1f} s{end}")
        return {tier: loads for tier, loads in self._loads.items() if loads}

    async def _measure(self) -> None:
        prompts = [self._fresh(length) for length in load_lengths(self._limits)]
        for prompt in (*prompts, *map(self._fresh, _push_lengths(self._limits))):
            await self._engine.complete([prompt], 1)
        for prompt in prompts:
            before = await self._engine.loaded()
            await self._engine.complete([prompt], 1)
            for tier, load in (await self._since(before)).items():
                self._loads[tier].append(load)

    async def _since(self, before: Mapping[str, Loaded]) -> dict[str, Loaded]:
        """The loads since `before`, whose report may be a little late."""
        for _ in range(20):
            found = {}
            for tier, now in (await self._engine.loaded()).items():
                then = before.get(tier, Loaded(0, 0.0))
                if now.tokens > then.tokens and now.seconds > then.seconds:
                    found[tier] = Loaded(now.tokens - then.tokens, now.seconds - then.seconds)
            if found:
                return found
            await asyncio.sleep(REPORTED_WITHIN_S / 20)
        return {}

    def _fresh(self, tokens: int) -> list[int]:
        return self._rng.choices(range(*TOKEN_IDS), k=tokens)


def load_lengths(limits: Limits) -> list[int]:
    """The lengths of the prompts that are loaded, the shortest first: at most a quarter of the KV cache."""
    longest = min(limits.cache_tokens // LONGEST_SHARE, limits.longest_prompt_tokens)
    return [longest // step for step in STEPS if longest >= step]


def _push_lengths(limits: Limits) -> Iterator[int]:
    """The lengths of prompts that fill the KV cache together."""
    left = limits.cache_tokens
    while left > 0:
        length = min(left, max(1, limits.longest_prompt_tokens))
        yield length
        left -= length


def fit_link(tier: str, loads: Sequence[Loaded]) -> TierLink | None:
    """The link with the least squared error over the loads. Needs scipy.

    None if the loads have one length only, or if more tokens took no more time.
    """
    lengths = {load.tokens for load in loads}
    if len(lengths) < 2:
        return None
    rows = [(1.0, float(load.tokens)) for load in loads]
    latency_s, token_s = non_negative_least_squares(rows, [load.seconds for load in loads])
    return TierLink(tier, token_s, latency_s) if token_s * max(lengths) > NOISE * latency_s else None
