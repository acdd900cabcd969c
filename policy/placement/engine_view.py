"""One engine as placement sees it: its cost model, window, residency, room and outstanding work."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.policy.cost_model import CostModel
from plait.policy.placement.load import LoadLedger
from plait.policy.placement.pace import Pace
from plait.policy.placement.prefill_queue import PrefillQueue
from plait.policy.prefix.residency import Residency

DEFAULT_BATCH_TOKENS = 2048
"""The token budget of an iteration if the engine does not report it: vLLM's default for serving."""


@dataclass(slots=True, eq=False)
class EngineView:
    """One engine's figures. The router owns and updates them; the policies read them.

    `free_tokens` is the part of the KV cache that no block fills: the reported number, less the tokens booked since
    then. It is None if the engine reports none; no eviction is expected then. `context_tokens` are the prompts of the
    `outstanding` calls, with half of the expected answer each. `batch_tokens` is the token budget of an iteration.
    `urgent_first` says that its local scheduler serves calls with a TTFT first.
    `computed_s` is what all prompts so far have added to iterations, by the cost model. `pace` tells how
    much slower the engine is than the others.
    """

    engine_id: str
    cost_model: CostModel
    ledger: LoadLedger
    residency: Residency
    free_tokens: float | None = None
    outstanding: int = 0
    context_tokens: float = 0.0
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    urgent_first: bool = False
    computed_s: float = 0.0
    pace: Pace = field(default_factory=Pace)

    @property
    def decodes(self) -> int:
        """Calls whose prompt is computed."""
        return self.outstanding - len(self.queue)

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration in which all outstanding calls decode, by the cost model."""
        return self.cost_model.decode_iteration_s(self.outstanding, self.context_tokens) if self.outstanding else 0.0

    def queue_s(self, now_s: float) -> float:
        """Seconds until the prompts that wait here are computed, by the cost model."""
        queue = self.queue
        queue.expire(now_s)
        if not len(queue):
            return 0.0
        return self.drain_s(queue.tokens) + queue.attention_s - queue.progress_s(now_s)

    def urgent_queue_s(self, now_s: float) -> float:
        """As `queue_s`, for a call with a TTFT: where the engine serves such calls first, only they count."""
        if not self.urgent_first:
            return self.queue_s(now_s)
        self.queue.expire(now_s)
        return self.drain_s(self.queue.urgent_tokens)

    def prefill_s(self, missed_tokens: int, cached_tokens: int) -> float:
        """Seconds of a new prompt's prefill, by the cost model."""
        return self.drain_s(missed_tokens) + self.cost_model.attention_time_s(missed_tokens, cached_tokens)

    def observe_decode(
        self, time_s: float, iterations: int, begun_iteration_s: float, begun_computed_s: float, now_s: float
    ) -> None:
        """A call decoded for `time_s` and `iterations`. `iteration_s` and `computed_s` were those at its begin.

        The cost model expects these iterations, and the prompts that were computed meanwhile.
        """
        decode_s = iterations * (begun_iteration_s + self.iteration_s) / 2
        self.pace.observe(time_s, decode_s + self.computed_s - begun_computed_s, now_s)

    def drain_s(self, tokens: int) -> float:
        """Seconds in which the engine computes `tokens` of prompts beside its decodes, without the prompts' attention.

        Each iteration has a token for each decode. The others are the prompts'.
        """
        costs, decodes = self.cost_model, self.decodes
        full, rest = divmod(tokens, max(1, self.batch_tokens - decodes))
        seconds = full * costs.forward(self.batch_tokens)
        if rest:
            seconds += costs.forward(rest + decodes)
        return seconds / costs.efficiency
