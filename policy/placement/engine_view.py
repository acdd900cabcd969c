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
    """One engine's figures. The router owns and updates them; the policies read them.

    `free_tokens` is the part of the KV cache that no block fills: the reported number, less the tokens booked since
    then. It is None if the engine reports none; no eviction is expected then. `kv_tokens` is the size of the KV cache,
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
        """The KV cache less the outstanding calls' tokens; infinite if not known. Cached prefixes can be evicted."""
        return inf if self.kv_tokens is None else self.kv_tokens - self.work.kv_tokens

    def expected_work(self, call: Call, missed_tokens: int, prefill_s: float) -> Work:
        """The work of `call` on this engine if `missed_tokens` are not cached and their prefill takes `prefill_s`."""
        output_tokens = self.ledger.mean_output_tokens
        if call.unannotated:
            return Work(kv_tokens=missed_tokens + output_tokens)
        decode_s = self.cost_model.decode_time_s(output_tokens, call.prompt_tokens)
        return Work(call.served_as, call.application, prefill_s, decode_s, missed_tokens + output_tokens)
