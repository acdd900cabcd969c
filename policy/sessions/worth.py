"""Whether it is worth it to hold sessions so that the contexts of the others stay in the engines' caches.

Two figures say it. The value of keeping a context is the prefill that it saves a turn, over the time for which it takes
its place. Where computing again is cheap, or sessions think for long, that is little. The load says how busy the
engines would be if each turn computed its whole context: below one they have the time. See docs/design/sessions.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from plait.policy.costs.cost_model import CostModel
from plait.policy.sessions.known import Session

JUDGED_S: Final = 1.0

RETURNS: Final = 500
"""So many of the latest think times count."""

LEAST_RETURNS: Final = 50
"""Until so many are known, nothing is held."""

CLOSES_VALUE, OPENS_VALUE = 0.55, 0.52
CLOSES_LOAD, OPENS_LOAD = 1.0, 0.9
"""The gate closes at both of the first, and opens below one of the second."""

PROMPTS_KEPT, OUTPUTS_KEPT = 0.99, 0.995
"""What a mean keeps with each further one."""

ACTIVE_S: Final = 10.0
ACTIVE_THINKS: Final = 3
"""A session is active for so long after its last call, or for so many mean think times if that is longer.

Those that are over must not count: conversations of a few turns are over soon, and never come back.
"""


class Caches(NamedTuple):
    """The engines that take the calls of a model: how many, and the KV of all of them in all tiers.

    Where several gateways share the engines, it is one gateway's part of both. So much of the KV is on accelerators as
    the `device_share`.
    """

    engines: float
    kv_tokens: int
    costs: CostModel
    slowness: float = 1.0
    device_share: float = 1.0

    def prefill_s(self, tokens: int) -> float:
        """Seconds in which an engine computes a whole context."""
        return self.slowness * self.costs.prefill_time_s(tokens) if tokens > 0 else 0.0

    def worth_s(self, tokens: int) -> float:
        """How long a context may be idle until keeping it has cost as much as computing it again.

        Of the engines' time, a context in their caches takes its share of the caches.
        """
        if tokens <= 0:
            return 0.0
        return self.prefill_s(tokens) * self.kv_tokens / (self.engines * tokens)


class Worth:
    """Measures a model's sessions, and says whether they are held: whether the gate `is_closed`.

    `look` returns the engines' `caches`; None if they do not say how large they are. Then the gate is open. It is
    judged anew from `due_s` on.
    """

    def __init__(self, look: Callable[[], Caches | None]) -> None:
        self.is_closed = False
        self.caches: Caches | None = None
        self._look = look
        self.due_s = 0.0
        self.value = self.load = 0.0
        self._thinks_s: deque[float] = deque(maxlen=RETURNS)
        self._returns = self._answers = 0
        self._prompt_tokens = self._output_tokens = 0.0

    @property
    def think_s(self) -> float:
        """The mean of the latest think times; 0 if none is known."""
        return sum(self._thinks_s) / len(self._thinks_s) if self._thinks_s else 0.0

    def returned(self, think_s: float, prompt_tokens: int) -> None:
        """A session's turn has come, so long after the end of the one before."""
        self._thinks_s.append(think_s)
        self._returns += 1
        self._prompt_tokens += max(1 - PROMPTS_KEPT, 1 / self._returns) * (prompt_tokens - self._prompt_tokens)

    def answered(self, output_tokens: int) -> None:
        self._answers += 1
        self._output_tokens += max(1 - OUTPUTS_KEPT, 1 / self._answers) * (output_tokens - self._output_tokens)

    def judge(self, known: Iterable[Session], now_s: float) -> None:
        """Look, once a second, whether it is worth it to hold any of the known sessions."""
        if now_s < self.due_s:
            return
        self.due_s = now_s + JUDGED_S
        caches = self.caches = self._look()
        if caches is None or self._returns < LEAST_RETURNS:
            self.is_closed = False
            return
        since_s = now_s - max(ACTIVE_S, ACTIVE_THINKS * self.think_s)
        active_s = sum(one.prefill_s for one in known if one.calls or one.held or one.ended_s > since_s)
        self._measure(caches, active_s)
        if self.is_closed:
            self.is_closed = self.value >= OPENS_VALUE and self.load >= OPENS_LOAD
        else:
            self.is_closed = self.value >= CLOSES_VALUE and self.load >= CLOSES_LOAD

    def _measure(self, caches: Caches, active_s: float) -> None:
        """All contexts of active sessions take `active_s` to compute."""
        decode_s = self._decode_s(caches)
        fill_s = caches.worth_s(round(self._prompt_tokens))
        thinks_s = self._thinks_s
        returns = sum(think_s <= fill_s for think_s in thinks_s) / len(thinks_s)
        kept_s = sum(min(think_s, fill_s) for think_s in thinks_s) / len(thinks_s)
        self.value = fill_s * returns / (decode_s + kept_s)
        self.load = active_s / (caches.engines * (self.think_s + decode_s))

    def _decode_s(self, caches: Caches) -> float:
        """A mean answer beside a full cache, by the cost model: what is measured has the thrashing in it."""
        kv_tokens = caches.device_share * caches.kv_tokens / caches.engines
        calls = max(1, round(kv_tokens / self._prompt_tokens))
        return self._output_tokens * caches.slowness * caches.costs.decode_iteration_s(calls, kv_tokens)
