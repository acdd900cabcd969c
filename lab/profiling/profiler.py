"""The profiler: runs the trials of a profile's plan on a live, otherwise idle engine, and measures its points.

Each round runs every trial once, so that a disturbance affects one repeat of many points instead of all repeats of one.
Further rounds repeat the trials whose repeats disagree. A point's value is the median of the closest half of its
repeats.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from statistics import median
from typing import Protocol

from plait.lab.profiling.profile_fit import Iteration, Point
from plait.lab.profiling.profile_plan import Effort, Kind, Limits, Trial, chunks, plan
from plait.lab.profiling.timed_stream import TimedStream, inter_token_s

TOKEN_IDS = (300, 1300)
"""Ordinary ids in every vocabulary, after the control tokens and single bytes."""

CACHED_SHARE = 0.75
"""The share of a prefix that must be cached. Engines round down to blocks, which may have hundreds of tokens."""

ONE_TOKEN_CALLS = 7
"""A sample of a prompt of one token, which tells a request's own time, is the median of so many calls."""


class ProfiledEngine(Protocol):
    """The engine to measure. `plait.lab.profiling.engine_probe` reaches it over HTTP."""

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of the times in streams, in seconds."""

    async def complete(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[TimedStream]:
        """Run the prompts at the same time, each for `output_tokens`."""

    async def check_idle(self) -> None:
        """Raise ValueError if the engine has calls of others."""


class NoSampleError(Exception):
    """A trial cannot be measured on this engine. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing: the iterations that the engine computed, and the seconds."""

    iterations: tuple[Iteration, ...]
    seconds: float


FEWEST_CALLS, SHARE_OF_CALLS = 6, 0.75
"""At least so many calls to the busy engine, and this share of them, must have waited equally long."""


@dataclass(frozen=True, slots=True)
class Queueing:
    """Calls to the busy engine: how many iterations of `iteration_s` each waited for."""

    iteration_s: float
    waits: list[int]

    def ahead(self, request_s: float) -> int | None:
        """How many iterations are planned beside the one that is computed: 0, 1, or None if it cannot be told.

        A request that takes about as long as an iteration (`request_s`, outside the engine) misses one on its way.
        """
        enough = max(FEWEST_CALLS, SHARE_OF_CALLS * len(self.waits)) if request_s < self.iteration_s / 2 else inf
        return next((ahead for ahead in (0, 1) if self.waits.count(ahead + 1) >= enough), None)


class TrialRunner:
    """Runs trials on one engine; `rng` makes the prompts."""

    def __init__(self, engine: ProfiledEngine, limits: Limits, rng: random.Random) -> None:
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
        streams: list[TimedStream] = []
        while len(streams) < (ONE_TOKEN_CALLS if trial.new_tokens == 1 else 1):
            streams += await self._engine.complete([self._fresh(trial.new_tokens)], 1)
        return self._prefill(sorted(streams, key=attrgetter("ttft_s"))[len(streams) // 2])

    async def _decode(self, trial: Trial) -> Sample:
        """Time decoding. The prompts are the same in each round, so that they are cached and decoding begins sooner."""
        prompts = self._decoding(trial)
        call = (1, len(prompts[0]) + trial.output_tokens // 2)  # nearly, at the second attempt
        for output_tokens in (trial.output_tokens, 2 * trial.output_tokens):
            gap_s = inter_token_s(await self._engine.complete(prompts, output_tokens))
            if gap_s is not None:
                return Sample(((call,) * trial.batch,), gap_s)
        raise NoSampleError("the engine does not run that many calls at once")

    async def queue(self, trial: Trial) -> Queueing:
        """Run a trial of decodes, and beside it calls of one token, each sent when the last has ended.

        So a call is sent when an iteration begins. It waits for this one, and for one more if that is planned already.
        """
        running = asyncio.create_task(self._engine.complete(self._decoding(trial), 2 * trial.output_tokens))
        await asyncio.sleep(0)  # the decodes begin
        sent: list[TimedStream] = []
        try:
            while not running.done():
                sent += await self._engine.complete([self._fresh(1)], 1)
            decodes = await running
        finally:
            running.cancel()
        iteration_s = inter_token_s(decodes) or 0.0
        starts_s, ends_s = max(one.arrivals[0][0] for one in decodes), min(one.arrivals[-1][0] for one in decodes)
        apart_s = iteration_s / 4  # tokens of one iteration come at nearly the same time
        waits = [
            sum(call.sent_s + apart_s < at_s < call.arrivals[0][0] - apart_s for at_s, _ in decodes[0].arrivals)
            for call in sent
            if starts_s < call.sent_s and call.arrivals[0][0] < ends_s
        ]
        return Queueing(iteration_s, waits)

    def _decoding(self, trial: Trial) -> list[list[int]]:
        return [self._same(trial.context_tokens + trial.new_tokens, number) for number in range(trial.batch)]

    async def _cached_prefix(self, trial: Trial) -> Sample:
        """Time a prefill after a cached prefix. If the first call misses the prefix, the second call will hit it."""
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


AGREEMENT = 0.05
"""The relative distance from a point's value within which more than half of its repeats must be."""

BUSY_CALLS = 8
"""So many decodes keep an engine busy without keeping this process busy, which would delay its times."""

MOST_ROUNDS = 3
"""How many times the planned rounds there may be, to repeat points that disagree."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The points, the number of timings, the engine's `system_fingerprint`, and the reasons for missing points."""

    points: list[Point]
    samples: int
    fingerprint: str | None
    omitted: list[str] = field(default_factory=list)
    queueing: Queueing | None = None


Samples = dict[tuple[Kind, tuple[Iteration, ...]], list[float]]


class Profiler:
    """Measures one engine. `rng` makes the prompts. `progress` gets a line for each group of trials."""

    def __init__(
        self,
        engine: ProfiledEngine,
        limits: Limits,
        effort: Effort,
        rng: random.Random,
        progress: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._runner = TrialRunner(engine, limits, rng)
        self._effort = effort
        self._progress = progress
        self._groups = plan(limits, effort)
        self._samples: Samples = defaultdict(list)
        self._latest: dict[Trial, list[float]] = {}  # the samples of the point that the trial measured last
        self._omitted: list[str] = []
        self._fingerprint: str | None = None

    async def measure(self) -> Measured:
        """Run the planned trials within the time limit. Raises ValueError if the limit is too short for a fit."""
        await self._engine.check_idle()
        self._fingerprint = (await self._runner.warm_up()).fingerprint
        clock = self._engine.clock
        zero_s = begun_s = clock()
        longest_s = 0.0
        repeats = self._effort.repeats
        for number in range(1, MOST_ROUNDS * repeats + 1):
            wanted = {kind: self._wanted(kind, number) for kind in self._groups}
            if not any(wanted.values()):
                break
            if begun_s - zero_s + longest_s > self._effort.limit_s:
                self._omitted.append(f"repeats beyond {number - 1}: out of time")
                break
            await self._round(number, {kind: trials for kind, trials in wanted.items() if trials}, begun_s)
            longest_s, begun_s = max(longest_s, clock() - begun_s), clock()
        measured = self._evaluate()
        *_, longest = (trial for trial in self._groups[Kind.DECODE] if trial.batch <= BUSY_CALLS)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._effort.limit_s):
                queueing = await self._runner.queue(longest)
                self._progress(f"calls waited for iterations of {queueing.iteration_s * 1e3:.1f} ms: {queueing.waits}")
                return replace(measured, queueing=queueing)
        return measured

    def _wanted(self, kind: Kind, number: int) -> list[Trial]:
        """All trials in the planned rounds; in later rounds only trials whose repeats disagree."""
        trials = self._groups[kind]
        return list(trials) if number <= self._effort.repeats else [trial for trial in trials if self._disputed(trial)]

    def _disputed(self, trial: Trial) -> bool:
        samples = self._latest.get(trial)
        if not samples:
            return False
        value = typical(samples)
        return 2 * sum(abs(sample - value) <= AGREEMENT * value for sample in samples) <= len(samples)

    async def _round(self, number: int, wanted: dict[Kind, list[Trial]], begun_s: float) -> None:
        """Run trials by kind within the round's part of the limit. The first round decides what can be measured."""
        clock = self._engine.clock
        ends_s = begun_s + self._effort.limit_s / self._effort.repeats
        for left, (kind, trials) in zip(range(len(wanted), 0, -1), wanted.items(), strict=True):
            now_s = clock()
            await self._group(trials, now_s + (ends_s - now_s) / left, first=number == 1)
            await self._engine.check_idle()
            self._progress(f"round {number}: {kind}, {len(trials)} points in {clock() - now_s:.1f} s")

    async def _group(self, trials: list[Trial], ends_s: float, *, first: bool) -> None:
        """Run trials of a kind. If the first round cannot measure a trial, it and all larger trials are dropped."""
        for trial in trials:
            if trial not in self._groups[trial.kind]:
                continue
            try:
                await self._run_until(ends_s, trial)
            except TimeoutError:
                if first:
                    self._drop(trial, "out of time", attrgetter("tokens"))
            except NoSampleError as reason:
                if first:
                    self._drop(trial, str(reason), attrgetter("batch"))

    async def _run_until(self, ends_s: float, trial: Trial) -> None:
        left_s = ends_s - self._engine.clock()
        if left_s <= 0:
            raise TimeoutError
        async with asyncio.timeout(left_s):
            sample = await self._runner.run(trial)
        samples = self._latest[trial] = self._samples[trial.kind, sample.iterations]
        samples.append(sample.seconds)

    def _drop(self, trial: Trial, reason: str, size: Callable[[Trial], int]) -> None:
        """Drop this trial and all that are at least as large."""
        trials = self._groups[trial.kind]
        trials[:] = [other for other in trials if size(other) < size(trial)]
        batch = f" in a batch of {trial.batch}" if trial.batch > 1 else ""
        self._omitted.append(
            f"{trial.kind} from {trial.new_tokens} behind {trial.context_tokens} tokens{batch}: {reason}"
        )

    def _evaluate(self) -> Measured:
        points = []
        for (kind, iterations), seconds in self._samples.items():
            new, context = iterations[-1][0]
            prompt_tokens = 0 if kind is Kind.DECODE else new + context
            point = Point(kind, iterations, typical(seconds), prompt_tokens, held_out=kind is Kind.CHUNKED)
            points.append(point)
        if not {Kind.DECODE, Kind.PREFILL} <= {point.kind for point in points}:
            raise ValueError(f"the engine is too slow to be profiled in {self._effort.limit_s:g} s")
        return Measured(points, sum(map(len, self._samples.values())), self._fingerprint, self._omitted)


def typical(samples: Sequence[float]) -> float:
    """The median of the closest half of the samples. Disturbances only add time, and each adds another amount."""
    ordered = sorted(samples)
    half = len(ordered) // 2 + 1
    start = min(range(len(ordered) - half + 1), key=lambda first: ordered[first + half - 1] - ordered[first])
    return median(ordered[start : start + half])
