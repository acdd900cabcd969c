"""Whether holding some sessions is worth it, so that the contexts of the others stay in the engines' caches.

In: each turn's think time and prompt (`returned`), and the length of each answer (`answered`). Out, once a second:
whether the gate is closed. Two figures decide.

- Value: the prefill seconds that keeping a context saves a turn, over the seconds for which the context takes room. The
  value is low where prefills are cheap or sessions think for long.
- Load: how busy the engines would be if each turn computed its whole context. Below 1 they have the time to do so.

See docs/design/sessions.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from plait.policy.costs.cost_model import CostModel
from plait.policy.sessions.known import Session

JUDGED_S: Final = 1.0

RETURNS: Final = 500
"""How many of the latest think times count."""

LEAST_RETURNS: Final = 50
"""With fewer known think times, no session is held."""

CLOSES_VALUE, OPENS_VALUE = 0.55, 0.52
CLOSES_LOAD, OPENS_LOAD = 1.0, 0.9
"""The gate closes when both figures reach `CLOSES_*`, and opens when one falls below `OPENS_*`."""

PROMPTS_KEPT, OUTPUTS_KEPT = 0.99, 0.995
"""The factor by which the old mean decays with each further value."""

ACTIVE_S: Final = 10.0
ACTIVE_THINKS: Final = 3
"""A session is active for this long after its last call, or for this many mean think times if that is longer.

Later sessions do not count: a conversation of a few turns is soon over and never returns.
"""


class Caches(NamedTuple):
    """The engines that take the calls of a model. Where several gateways share them, this gateway's part."""

    engines: float
    """How many."""
    kv_tokens: int
    """The size of their KV caches, all tiers included."""
    costs: CostModel
    slowness: float = 1.0
    device_share: float = 1.0
    """The part of `kv_tokens` on accelerators."""

    def prefill_s(self, tokens: int) -> float:
        return self.slowness * self.costs.prefill_time_s(tokens) if tokens > 0 else 0.0

    def worth_s(self, tokens: int) -> float:
        """How long a context may be idle until keeping it has cost as much as computing it again.

        A context costs the same part of the engines' time as it takes of their caches.
        """
        if tokens <= 0:
            return 0.0
        return self.prefill_s(tokens) * self.kv_tokens / (self.engines * tokens)


class Worth:
    """Measures a model's sessions, and decides whether the gate `is_closed`.

    `look` returns the engines' caches; None if their sizes are not known: then the gate is open. The next decision is
    due at `due_s`.
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
        """The mean of the latest think times; 0 without any."""
        return sum(self._thinks_s) / len(self._thinks_s) if self._thinks_s else 0.0

    def returned(self, think_s: float, prompt_tokens: int) -> None:
        """A session's next turn has arrived, `think_s` after the end of the one before."""
        self._thinks_s.append(think_s)
        self._returns += 1
        self._prompt_tokens += max(1 - PROMPTS_KEPT, 1 / self._returns) * (prompt_tokens - self._prompt_tokens)

    def answered(self, output_tokens: int) -> None:
        self._answers += 1
        self._output_tokens += max(1 - OUTPUTS_KEPT, 1 / self._answers) * (output_tokens - self._output_tokens)

    def judge(self, known: Iterable[Session], now_s: float) -> None:
        """Decide, at most once in `JUDGED_S`, whether the gate is closed."""
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
        """Compute value and load; `active_s` is the time to compute all contexts of active sessions."""
        decode_s = self._decode_s(caches)
        fill_s = caches.worth_s(round(self._prompt_tokens))
        thinks_s = self._thinks_s
        returns = sum(think_s <= fill_s for think_s in thinks_s) / len(thinks_s)
        kept_s = sum(min(think_s, fill_s) for think_s in thinks_s) / len(thinks_s)
        self.value = fill_s * returns / (decode_s + kept_s)
        self.load = active_s / (caches.engines * (self.think_s + decode_s))

    def _decode_s(self, caches: Caches) -> float:
        """The time of a mean answer beside a full cache, by the cost model: measured times include the thrashing."""
        kv_tokens = caches.device_share * caches.kv_tokens / caches.engines
        calls = max(1, round(kv_tokens / self._prompt_tokens))
        return self._output_tokens * caches.slowness * caches.costs.decode_iteration_s(calls, kv_tokens)
