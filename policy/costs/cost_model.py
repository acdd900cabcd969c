"""The cost model: how long an engine computes, from a fitted profile (docs/design/cost-model.md).

The time of a forward pass has two parts. The first is piecewise linear in the new tokens (weights, activations). The
second is attention over the whole sequence. Preble (figures 9 and 10) finds both regular enough for a regression.
Profiles have the coefficients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from operator import itemgetter

from plait.policy.costs.tier_link import TierLink

USUAL_TOKENS = 2048
"""The speed of an engine is its tokens per second on a prompt of this length."""

PIVOT_SHARE = 0.9
"""Ours: at the pivot, throughput is this share of its asymptote. AccelGen reads the pivot off a plot."""


@dataclass(frozen=True, slots=True)
class PiecewiseLinear:
    """Seconds by token count: lines between `knots`, flat before the first, `slope_s` a token after the last."""

    knots: tuple[tuple[int, float], ...]
    slope_s: float
    _tokens: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The knots' token counts: `bisect` searches a plain tuple without calling a key function."""

    _lines: tuple[tuple[int, float, float, int], ...] = field(init=False, repr=False, compare=False)
    """(first tokens, first seconds, rise in seconds, width in tokens) of each line: before the first knot, between
    each two knots, after the last.
    """

    def __post_init__(self) -> None:
        tokens = [knot[0] for knot in self.knots]
        seconds = [knot[1] for knot in self.knots]
        if not self.knots or tokens != sorted(set(tokens)):
            raise ValueError("knots must have strictly ascending token counts, and there must be at least one knot")
        if seconds != sorted(seconds) or seconds[0] < 0 or self.slope_s < 0:
            raise ValueError("seconds must not fall or be negative: more tokens cannot take less time")
        between = (
            (left, left_s, right_s - left_s, right - left) for (left, left_s), (right, right_s) in pairwise(self.knots)
        )
        lines = (tokens[0], seconds[0], 0.0, 1), *between, (tokens[-1], seconds[-1], self.slope_s, 1)
        object.__setattr__(self, "_tokens", tuple(tokens))
        object.__setattr__(self, "_lines", lines)

    def at(self, tokens: int) -> float:
        left_tokens, left_s, rise_s, width = self._lines[bisect_right(self._tokens, tokens)]
        return left_s + rise_s * (tokens - left_tokens) / width

    def reach(self, seconds: float) -> float:
        """The most tokens that take no longer than `seconds`; infinite if more tokens never take longer."""
        index = bisect_right(self.knots, seconds, key=itemgetter(1))
        left_tokens, left_s, rise_s, width = self._lines[index]
        if seconds < left_s:
            return 0
        return left_tokens + (seconds - left_s) * width / rise_s if rise_s else inf

    def scaled(self, factor: float) -> PiecewiseLinear:
        """The curve with all its times multiplied."""
        knots = tuple((tokens, factor * seconds) for tokens, seconds in self.knots)
        return PiecewiseLinear(knots, factor * self.slope_s)


@dataclass(frozen=True, slots=True)
class Pivot:
    """The pivot forward size (AccelGen, section 3.1): new tokens of an iteration, and the time that it takes."""

    tokens: int
    time_s: float


@dataclass(frozen=True, slots=True)
class LongAttention:
    """The extra attention time of a prefill whose `new x sequence` tokens exceed `threshold`; sequence = context + new.

    The sum of three terms: `new_s` per new token, `sequence_s` per sequence token, `product_s` per unit of the product.
    """

    threshold: int = 0
    new_s: float = 0.0
    sequence_s: float = 0.0
    product_s: float = 0.0

    def __call__(self, new_tokens: int, sequence_tokens: int) -> float:
        """Seconds for one prefill; 0 up to the threshold."""
        product = new_tokens * sequence_tokens
        if product <= self.threshold:
            return 0.0
        return self.new_s * new_tokens + self.sequence_s * sequence_tokens + self.product_s * product


@dataclass(frozen=True, slots=True)
class CostModel:
    """The seconds of a forward pass: (`forward` + attention + `long_attention` of each prefill) / `efficiency`.

    Attention takes `context_constant_s` + `context_s` * sequence tokens, but at least `context_floor_s`.
    """

    forward: PiecewiseLinear
    """Seconds by the new tokens of the batch, if all its calls decode."""
    context_constant_s: float
    context_s: float
    context_floor_s: float
    long_attention: LongAttention
    efficiency: float = 1.0
    links: tuple[TierLink, ...] = ()
    """The links to the lower tiers of the cache that the profile knows."""
    with_prompts: PiecewiseLinear | None = None
    """Seconds by the new tokens of a batch with prompts; None: as in `forward`.

    Engines run decodes alone as recorded CUDA graphs, and many run any batch with a prompt without.
    """
    step_s: float = 0.0
    """No iteration with prompts takes less, attention included: launching its kernels one by one takes this long."""
    prompts: PiecewiseLinear = field(init=False, repr=False, compare=False)
    """`with_prompts`, or `forward`."""
    tokens_per_s: float = field(init=False, repr=False, compare=False)
    """The speed of the prefill of `USUAL_TOKENS` in large iterations; 1 if the prefill takes no time."""
    _one_s: float = field(init=False, repr=False, compare=False)
    """The seconds of one decoded token without attention."""

    def __post_init__(self) -> None:
        if min(self.context_s, self.context_floor_s) < 0 or self.efficiency <= 0:
            raise ValueError("attention times must be 0 or more, and efficiency must be above 0")
        object.__setattr__(self, "prompts", self.with_prompts or self.forward)
        usual_s = self.added_s(USUAL_TOKENS, 0)[0]
        object.__setattr__(self, "tokens_per_s", USUAL_TOKENS / usual_s if usual_s else 1.0)
        object.__setattr__(self, "_one_s", self.forward.at(1))

    def iteration_time_s(self, work: Iterable[tuple[int, int]]) -> float:
        """The time of one forward pass; `work` has `(new tokens, context tokens)` of each call in the batch.

        The constant counts once. The linear part depends on the batch's total new tokens, attention on its total
        sequence tokens. Each prefill adds its own `new x sequence` term. A call with one new token is a decode.
        """
        new_total = sequence_total = 0
        chunks = []
        for new_tokens, context_tokens in work:
            new_total += new_tokens
            sequence_total += new_tokens + context_tokens
            if new_tokens > 1:
                chunks.append((new_tokens, context_tokens))
        return self.batch_time_s(new_total, sequence_total, chunks)

    def batch_time_s(self, new_tokens: int, sequence_tokens: int, chunks: Collection[tuple[int, int]]) -> float:
        """As `iteration_time_s`, from the batch's totals and its `chunks` of more than one new token."""
        if new_tokens <= 0:
            return 0.0
        attention_s = max(self.context_floor_s, self.context_constant_s + self.context_s * sequence_tokens)
        if not chunks:
            return (self.forward.at(new_tokens) + attention_s) / self.efficiency
        long_s = sum([self.long_attention(new, new + context) for new, context in chunks])
        return max(self.step_s, (self.prompts.at(new_tokens) + attention_s + long_s) / self.efficiency)

    def prefill_time_s(self, new_tokens: int, context_tokens: int = 0) -> float:
        """The time to compute `new_tokens` of a prompt after `context_tokens` that are cached, alone in one pass."""
        if new_tokens <= 0:
            return 0.0
        sequence_tokens = new_tokens + context_tokens
        is_long = new_tokens > 1 and new_tokens * sequence_tokens > self.long_attention.threshold
        long_s = self.long_attention(new_tokens, sequence_tokens) if is_long else 0.0
        floor_s, attention_s = self.context_floor_s, self.context_constant_s + self.context_s * sequence_tokens
        context_s = attention_s if attention_s > floor_s else floor_s  # a call of `max` costs more than all the rest
        if new_tokens == 1:
            return (self._one_s + context_s) / self.efficiency
        seconds = (self.prompts.at(new_tokens) + context_s + long_s) / self.efficiency
        return seconds if seconds > self.step_s else self.step_s

    def decode_time_s(self, output_tokens: float, context_tokens: float = 0) -> float:
        """The time to generate `output_tokens` one by one after `context_tokens`, alone on the engine.

        Every token is taken to cost as much as the middle one, which is exact where attention is linear in the context.
        """
        mean_sequence = context_tokens + output_tokens / 2
        floor_s, attention_s = self.context_floor_s, self.context_constant_s + self.context_s * mean_sequence
        context_s = attention_s if attention_s > floor_s else floor_s
        return output_tokens * (self._one_s + context_s) / self.efficiency

    def added_s(self, new_tokens: int, context_tokens: int) -> tuple[float, float]:
        """The seconds that a prefill adds to iterations beyond the last knot: (total, part of attention)."""
        sequence_tokens = new_tokens + context_tokens
        is_long = new_tokens * sequence_tokens > self.long_attention.threshold
        long_s = self.long_attention(new_tokens, sequence_tokens) if is_long else 0.0
        attention_s = (self.context_s * sequence_tokens + long_s) / self.efficiency
        return self.prompts.slope_s * new_tokens / self.efficiency + attention_s, attention_s

    def marginal_s(self, new_tokens: float) -> float:
        """The seconds that `new_tokens` add to an iteration beyond the last knot, without attention."""
        return self.prompts.slope_s * new_tokens / self.efficiency

    def decode_iteration_s(self, calls: int, context_tokens: float) -> float:
        """The time of an iteration in which `calls` calls decode; `context_tokens` is the sum of their contexts."""
        floor_s, attention_s = self.context_floor_s, self.context_constant_s + self.context_s * context_tokens
        context_s = attention_s if attention_s > floor_s else floor_s
        return (self.forward.at(calls) + context_s) / self.efficiency

    def pivot(self) -> Pivot | None:
        """The fewest new tokens from which throughput stays at 90 % of its asymptote; None without an asymptote.

        The throughput of an iteration of n tokens is n / prompts(n). It approaches 1 / slope as n grows. It is at least
        the share p of 1 / slope where g(n) = slope n - p prompts(n) >= 0. g is linear between knots. After the last
        knot it rises at (1 - p) slope. So the pivot is the last zero of g. This throughput leaves attention out.
        Attention depends on the context, not on the size of the iteration, and a quadratic term has no asymptote. The
        pivot's time includes the attention of one prompt without context.
        """
        slope_s = self.prompts.slope_s
        if slope_s <= 0:
            return None  # time does not grow with the tokens, so throughput grows without bound
        knots = self.prompts.knots
        right_tokens, right_lead = knots[-1][0], slope_s * knots[-1][0] - PIVOT_SHARE * knots[-1][1]
        if right_lead < 0:
            return self._pivot_at(right_tokens - right_lead / ((1 - PIVOT_SHARE) * slope_s))
        for tokens, seconds in reversed(knots[:-1]):
            lead = slope_s * tokens - PIVOT_SHARE * seconds
            if lead < 0:
                return self._pivot_at(tokens - lead * (right_tokens - tokens) / (right_lead - lead))
            right_tokens, right_lead = tokens, lead
        return self._pivot_at(PIVOT_SHARE * knots[0][1] / slope_s)

    def _pivot_at(self, tokens: float) -> Pivot:
        whole = max(1, ceil(tokens - 1e-6))
        return Pivot(whole, self.prefill_time_s(whole))
