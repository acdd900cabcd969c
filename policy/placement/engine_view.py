"""One engine as placement sees it: its cost model, window, residency, room and outstanding work."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from plait.policy.cost_model import CostModel
from plait.policy.placement.load import LoadLedger
from plait.policy.placement.outstanding import OutstandingWork, Work
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call


@dataclass(slots=True, eq=False)
class EngineView:
    """The router owns and updates it; the policies read it.

    `free_tokens` is the room in the KV cache that no cached block fills: as reported, less what was booked since. It is
    None if the engine's capacity is not known; then no eviction is expected. `kv_tokens` is the size of the KV cache,
    None if not known.
    """

    engine_id: str
    cost_model: CostModel
    ledger: LoadLedger
    residency: Residency
    free_tokens: float | None = None
    outstanding: int = 0
    kv_tokens: int | None = None
    work: OutstandingWork = field(default_factory=OutstandingWork)

    @property
    def room_tokens(self) -> float:
        """The KV cache less the outstanding calls' tokens, as cached prefixes can be evicted; infinite if not known."""
        return inf if self.kv_tokens is None else self.kv_tokens - self.work.kv_tokens

    def expected_work(self, call: Call, missed_tokens: int, prefill_s: float) -> Work:
        """The work of `call` here, if it misses `missed_tokens` and their prefill takes `prefill_s`."""
        output_tokens = self.ledger.mean_output_tokens
        if call.unannotated:
            return Work(kv_tokens=missed_tokens + output_tokens)
        decode_s = self.cost_model.decode_time_s(output_tokens, call.prompt_tokens)
        return Work(call.served_as, call.application, prefill_s, decode_s, missed_tokens + output_tokens)
