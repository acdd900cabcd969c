"""One engine as placement sees it: its cost model, window, residency, room and outstanding work."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.policy.cost_model import CostModel
from plait.policy.placement.load import LoadLedger
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

    def queue_s(self, now_s: float) -> float:
        """Seconds until the prompts that wait here are computed."""
        queue = self.queue
        if not len(queue):
            return 0.0
        decodes = self.outstanding - len(queue)
        return self.drain_s(queue.tokens, decodes) + queue.attention_s - queue.progress_s(now_s)

    def drain_s(self, tokens: int, decodes: int) -> float:
        """Seconds in which the engine computes `tokens` of prompts while `decodes` calls decode, without attention.

        Each iteration has a token for each decode. The others are the prompts'.
        """
        costs = self.cost_model
        full, rest = divmod(tokens, max(1, self.batch_tokens - decodes))
        seconds = full * costs.forward(self.batch_tokens)
        if rest:
            seconds += costs.forward(rest + decodes)
        return seconds / costs.efficiency
