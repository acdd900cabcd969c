"""How many tokens an iteration may compute so that it ends within the tightest SLO in it (AccelGen, section 4.2).

The model of iteration times is solved for the tokens. The model includes attention, so context counts too.
"""

from __future__ import annotations

from math import inf

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.scheduling.iteration_model import CLEAR, IterationModel

NO_TIMES = CostModel(PiecewiseLinear(((0, 0.0),), 0.0), 0.0, 0.0, 0.0, LongAttention())
"""While an engine's times are not known, only its maximum of tokens limits an iteration."""


class Budget:
    """An iteration's compute budget. `tokens` are the tokens taken so far, `limit_s` is the iteration's time limit.

    The iteration's time is kept as running sums.
    """

    def __init__(self, max_tokens: int, costs: CostModel) -> None:
        self.tokens = 0
        self.limit_s = inf
        self._max_tokens = max_tokens
        self._costs = costs
        self._sequence_tokens = 0
        self._long_s = 0.0
        self._prompts = 0

    def time_s(self, new_tokens: int = 0, context_tokens: int = 0) -> float:
        """How long the iteration takes with one more call; the same as `CostModel.iteration_time_s`."""
        costs, tokens, long_s = self._costs, self.tokens + new_tokens, self._long_s
        if tokens <= 0:
            return 0.0
        forward, step_s = (costs.prompts, costs.step_s) if self._prompts else (costs.forward, 0.0)
        sequence_tokens = self._sequence_tokens + new_tokens + context_tokens
        if new_tokens > 1:
            forward, step_s = costs.prompts, costs.step_s
            long_s += costs.long_attention(new_tokens, new_tokens + context_tokens)
        attention_s = max(costs.context_floor_s, costs.context_constant_s + costs.context_s * sequence_tokens)
        return max(step_s, (forward.at(tokens) + attention_s + long_s) / costs.efficiency)

    def least_s(self, context_tokens: int) -> float:
        """How long the iteration takes with a prompt after `context_tokens`, at least.

        The prompt has all the tokens that make an iteration hardly longer than the first ones do.
        """
        prompts, first = self._costs.prompts, self.tokens + 2
        free = min(prompts.reach(CLEAR * prompts.at(first)), self._max_tokens) - self.tokens
        return self.time_s(max(2, int(free)), context_tokens)

    def room(
        self, wanted_tokens: int, context_tokens: int = 0, floor_tokens: int = 0, limit_s: float | None = None
    ) -> int:
        """How many of a call's `wanted_tokens` fit. Of these, `floor_tokens` may exceed the time limit.

        What takes no longer than the floor, or than the iteration does already, fits too.
        """
        high = min(wanted_tokens, self._max_tokens - self.tokens)
        if high <= 0:
            return 0
        limit_s = self.limit_s if limit_s is None else limit_s
        if limit_s < inf and (self._prompts or floor_tokens):
            limit_s = max(limit_s, self.time_s(min(high, floor_tokens), context_tokens))
        high_s = self.time_s(high, context_tokens) if limit_s < inf else 0.0
        if high_s <= limit_s:
            return high
        low = 2  # one token would run as a decode, which may be much faster
        low_s = self.time_s(low, context_tokens)
        if low_s > limit_s or high < low:  # usual once the iteration is full
            return 0
        # Time is mostly linear in tokens. First try the point at which a line meets the limit, then bisect the rest.
        guess = low + int((high - low) * (limit_s - low_s) / (high_s - low_s))
        for middle in (guess, guess + 1):
            if low < middle < high:
                if self.time_s(middle, context_tokens) <= limit_s:
                    low = middle
                else:
                    high = middle
        while low < high - 1:
            middle = (low + high) // 2
            if self.time_s(middle, context_tokens) <= limit_s:
                low = middle
            else:
                high = middle
        return low

    def take(self, new_tokens: int, context_tokens: int = 0) -> None:
        self.tokens += new_tokens
        self._sequence_tokens += new_tokens + context_tokens
        if new_tokens > 1:
            self._prompts += 1
            self._long_s += self._costs.long_attention(new_tokens, new_tokens + context_tokens)

    def give_back(self, new_tokens: int, context_tokens: int = 0) -> None:
        self.tokens -= new_tokens
        self._sequence_tokens -= new_tokens + context_tokens
        if new_tokens > 1:
            self._prompts -= 1
            self._long_s -= self._costs.long_attention(new_tokens, new_tokens + context_tokens)

    def take_decodes(self, new_tokens: int, context_tokens: int) -> None:
        """Add decodes with `new_tokens` and `context_tokens` in all."""
        self.tokens += new_tokens
        self._sequence_tokens += new_tokens + context_tokens


def model_budget(max_tokens: int, model: IterationModel) -> Budget:
    """An empty iteration's budget."""
    return Budget(max_tokens, model.costs or NO_TIMES)
