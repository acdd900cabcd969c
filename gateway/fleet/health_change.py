"""A change of an engine's health, as the router returns it. The asyncio shell (`recovery`) acts on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plait.gateway.fleet.health import HealthState


class Aborts(StrEnum):
    """The calls on an engine that are aborted when its health changes: waiting ones have no byte of their answer."""

    NONE = "none"
    WAITING = "waiting"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class HealthChange:
    """An engine's state before and after, and why. `aborts` says which of its calls are aborted and moved."""

    engine_id: str
    before: HealthState
    after: HealthState
    cause: str
    aborts: Aborts = Aborts.NONE
