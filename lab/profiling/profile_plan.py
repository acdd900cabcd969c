"""Plans which points of a cost profile to measure, within the engine's limits: pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from plait.lab.profiling.profile_fit import Iteration

SHORT_TOKENS = 32
"""A context with almost no attention cost, and as a prompt, few iterations."""

WHOLE_TOKENS = 64
"""Cached prefixes are multiples of this, and so of most engines' blocks: a partly filled last block is not cached."""

WINDOW_TOKENS = 24
"""How many gaps between tokens a measurement of decoding covers."""

LIKELY_BUDGET_TOKENS = 2048
"""The assumed token budget if the engine does not report one."""

KV_SHARE = 0.8
"""The share of the KV cache for a trial, so that no call is preempted and no cached prefix evicted."""


class Kind(StrEnum):
    """What a trial measures; the values are for the report. Kinds are measured in this order, the longest last."""

    PREFILL = "prefill"
    CACHED_PREFIX = "prefill behind a cached prefix"
    CHUNKED = "prefill over several iterations"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's context length, token budget and KV cache. The last two are None if they are not reported."""

    context_tokens: int
    budget_tokens: int | None = None
    kv_tokens: int | None = None

    @property
    def cache_tokens(self) -> int:
        """The KV cache's size. Without a report, it is assumed to have room for one call of full length."""
        return self.kv_tokens or self.context_tokens

    @property
    def most_tokens(self) -> int:
        """The most tokens of a trial in the KV cache."""
        return int(KV_SHARE * self.cache_tokens)

    @property
    def longest_prompt_tokens(self) -> int:
        """The longest prompt, with room for its output."""
        return min(self.context_tokens, self.most_tokens) - 2

    @property
    def most_new_tokens(self) -> int:
        """The longest prompt that one iteration can compute, with room for its output."""
        return min(self.budget_tokens or self.context_tokens, self.longest_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement: `batch` calls at once, each with `new_tokens` to compute behind `context_tokens`."""

    kind: Kind
    new_tokens: int
    context_tokens: int = 0
    batch: int = 1
    output_tokens: int = 1

    @property
    def tokens(self) -> int:
        """The trial's tokens in the KV cache at its end. Trials run in this order, because more tokens take longer."""
        return self.batch * (self.new_tokens + self.context_tokens + self.output_tokens)

    def fits(self, limits: Limits) -> bool:
        """Whether the engine has room for the trial, even with twice the output."""
        longest = self.new_tokens + self.context_tokens + 2 * self.output_tokens
        return longest <= limits.context_tokens and self.batch * longest <= limits.most_tokens


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: `repeats` of each trial within `limit_s`, with these sizes.

    `ladder` has the lengths of prompts, `behind` the lengths of prompts after a cached prefix. There are `prefixes`
    cached prefixes, each a quarter as long as the one before.
    """

    repeats: int
    limit_s: float
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    ladder: tuple[int, ...]
    behind: tuple[int, ...]
    prefixes: int
    longest_prefix_tokens: int
    chunks: tuple[int, ...]


_LADDER = (16, 32, 64, 128, 192, 256, 257, 384, 512, 513, 768, 896, 1024, 1536, 2048, 3072, 4096)

QUICK = Effort(
    repeats=3,
    limit_s=50.0,
    batches=(1, 2, 4, 5, 8, 9, 16),
    contexts=(1024, 4096),
    ladder=_LADDER,
    behind=(32, 256, 1024),
    prefixes=2,
    longest_prefix_tokens=12_288,
    chunks=(2,),
)
FULL = Effort(
    repeats=5,
    limit_s=280.0,
    batches=(1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64),
    contexts=(512, 2048, 8192, 32_768),
    ladder=tuple(sorted({8, 24, 48, 96, 640, 6144, 8192, 12_288, 16_384, *_LADDER})),
    behind=(16, 64, 256, 1024, 4096),
    prefixes=4,
    longest_prefix_tokens=65_536,
    chunks=(2, 4),
)


def plan(limits: Limits, effort: Effort) -> dict[Kind, list[Trial]]:
    """The trials of each kind, the cheapest first. Kinds that do not fit the engine are left out.

    The first trial of `PREFILL` is a prompt of one token. Its work is that of one decode; the rest is overhead.
    """
    trials = {
        Kind.PREFILL: _prefill(limits, effort),
        Kind.CACHED_PREFIX: _cached_prefix(limits, effort),
        Kind.CHUNKED: _chunked(limits, effort),
        Kind.DECODE: _decode(limits, effort),
    }
    fitting = {
        kind: sorted({trial for trial in found if trial.fits(limits)}, key=lambda trial: (trial.tokens, trial.batch))
        for kind, found in trials.items()
    }
    return {kind: found for kind, found in fitting.items() if found}


def chunks(new_tokens: int, context_tokens: int, budget_tokens: int | None) -> tuple[Iteration, ...]:
    """The iterations in which an idle engine computes a prompt."""
    size = budget_tokens or new_tokens
    starts = range(0, new_tokens, size)
    return tuple(((min(size, new_tokens - start), context_tokens + start),) for start in starts)


def _decode(limits: Limits, effort: Effort) -> Iterator[Trial]:
    budget = limits.budget_tokens or LIKELY_BUDGET_TOKENS
    pairs = [(batch, SHORT_TOKENS) for batch in effort.batches]
    pairs += [(batch, context) for batch in (1, 8) for context in effort.contexts]
    for batch, context in pairs:
        # The first calls decode while the other prompts are computed. The window begins after that.
        output = WINDOW_TOKENS + ceil(batch * context / budget)
        yield Trial(Kind.DECODE, 1, context - 1, batch, output)


def _prefill(limits: Limits, effort: Effort) -> Iterable[Trial]:
    most = min(limits.most_new_tokens, effort.ladder[-1])
    return [Trial(Kind.PREFILL, size) for size in (1, *(size for size in effort.ladder if size < most), most)]


def _cached_prefix(limits: Limits, effort: Effort) -> Iterator[Trial]:
    sizes = [size for size in effort.behind if size <= limits.most_new_tokens]
    longest = min(limits.context_tokens, limits.most_tokens // 2) - max(sizes, default=0) - 2
    longest = min(longest, effort.longest_prefix_tokens)
    for step in range(effort.prefixes):
        context = (longest >> 2 * step) // WHOLE_TOKENS * WHOLE_TOKENS
        if context > 0:
            yield from (Trial(Kind.CACHED_PREFIX, size, context) for size in sizes)


def _chunked(limits: Limits, effort: Effort) -> Iterator[Trial]:
    if limits.budget_tokens is not None:
        yield from (Trial(Kind.CHUNKED, limits.budget_tokens * count) for count in effort.chunks)
