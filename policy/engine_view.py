"""One engine as placement sees it: its cost model, its window, its residency, its room."""

from __future__ import annotations

from dataclasses import dataclass

from policy.cost_model import CostModel
from policy.load import LoadLedger
from policy.residency import Residency


@dataclass(slots=True, eq=False)
class EngineView:
    """Owned and updated by the router, read by the policies.

    `free_tokens` is room in the KV cache that no cached block fills: as reported, less what was booked since; None
    where the engine's capacity is not known, and then no eviction is foreseen.
    """

    engine_id: str
    cost_model: CostModel
    ledger: LoadLedger
    residency: Residency
    free_tokens: float | None = None
    outstanding: int = 0
