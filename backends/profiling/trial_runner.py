"""Runs trials of a profile's plan on the engine: returns the measured iterations and how long they took."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.backends.profiling.profile_fit import Iteration
from plait.backends.profiling.profile_plan import Kind, Limits, Trial, chunks
from plait.backends.profiling.timed_stream import TimedStream, inter_token_s

TOKEN_IDS = (300, 1300)
"""Ordinary ids in every vocabulary, after the control tokens and single bytes."""

CACHED_SHARE = 0.75
"""A prefix counts as cached from this share on. Engines round down to blocks, which may have hundreds of tokens."""


class Engine(Protocol):
    """The engine to measure. `plait.backends.profiling.engine_probe` reaches it over HTTP."""

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of the times in streams, in seconds."""

    async def complete(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[TimedStream]:
        """Run the prompts at the same time, each for `output_tokens`."""

    async def check_idle(self) -> None:
        """Raise ValueError if the engine has calls that are not ours."""


class NoSampleError(Exception):
    """A trial cannot be measured on this engine. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing: the iterations that the engine computed, and the seconds."""

    iterations: tuple[Iteration, ...]
    seconds: float


class TrialRunner:
    """Runs trials on one engine; `rng` makes the prompts."""

    def __init__(self, engine: Engine, limits: Limits, rng: random.Random) -> None:
        self._engine = engine
        self._limits = limits
        self._rng = rng
        self._prompts: dict[tuple[int, int], list[int]] = {}

    async def warm_up(self) -> TimedStream:
        """Run a first call, so that the engine's one-time work is not measured."""
        [stream] = await self._engine.complete([self._fresh(2)], 2)
        return stream

    async def run(self, trial: Trial) -> Sample:
        """Run a trial once; raises `NoSampleError`."""
        if trial.kind is Kind.DECODE:
            return await self._decode(trial)
        if trial.kind is Kind.CACHED_PREFIX:
            return await self._cached_prefix(trial)
        [stream] = await self._engine.complete([self._fresh(trial.new_tokens)], 1)
        return self._prefill(stream)

    async def _decode(self, trial: Trial) -> Sample:
        """Time decoding. The prompts are the same in each round, so that they are cached and decoding begins sooner."""
        length = trial.context_tokens + trial.new_tokens
        prompts = [self._same(length, number) for number in range(trial.batch)]
        for output_tokens in (trial.output_tokens, 2 * trial.output_tokens):
            gap_s = inter_token_s(await self._engine.complete(prompts, output_tokens))
            if gap_s is not None:
                call = (1, length + output_tokens // 2)
                return Sample(((call,) * trial.batch,), gap_s)
        raise NoSampleError("the engine does not run that many calls at once")

    async def _cached_prefix(self, trial: Trial) -> Sample:
        """Time a prefill behind a cached prefix. If the first call misses the prefix, it caches it for the second."""
        prefix = self._same(trial.context_tokens, 0)
        for _ in range(2):
            [stream] = await self._engine.complete([prefix + self._fresh(trial.new_tokens)], 1)
            if stream.cached_tokens is None:
                raise NoSampleError("the engine's usage does not report cached tokens")
            if stream.cached_tokens >= CACHED_SHARE * trial.context_tokens:
                return self._prefill(stream)
        raise NoSampleError("the engine does not keep the prefix cached")

    def _prefill(self, stream: TimedStream) -> Sample:
        cached_tokens = stream.cached_tokens or 0
        iterations = chunks(stream.prompt_tokens - cached_tokens, cached_tokens, self._limits.budget_tokens)
        return Sample(iterations, stream.ttft_s)

    def _fresh(self, tokens: int) -> list[int]:
        """A new prompt. Prompts of one or two tokens may repeat, which does no harm."""
        return self._rng.choices(range(*TOKEN_IDS), k=tokens)

    def _same(self, tokens: int, number: int) -> list[int]:
        return self._prompts.setdefault((tokens, number), self._fresh(tokens))
