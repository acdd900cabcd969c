"""What an engine serves and counts, as its probes say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Offer:
    """An engine's models, each with its context in tokens (None: not known), and its routes.

    `adapters` maps each LoRA adapter among the models to its base model. `routes` are paths; None: not known.
    """

    models: Mapping[str, int | None] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    routes: Collection[str] | None = None

    def has(self, route: str) -> bool | None:
        """Whether the engine has a route; None if that is not known.

        Engines have some routes with and without `/v1`, and do not always list both.
        """
        return None if self.routes is None else route in self.routes or f"/v1{route}" in self.routes


class EngineCounts(NamedTuple):
    """Calls that run and wait in an engine, and its KV cache in tokens (None: it does not say)."""

    running: int
    waiting: int
    kv_tokens: int | None
