"""The placement policies: what one is, all of them by their names in the configuration, and the plain ones.

A policy chooses the engine of a call. It reads the `Situation`, changes nothing, and returns a `Placement`. The router
books it. A call that continues another is placed on the same engine, under every policy: its prompt is cached there.
See docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation, cached_blocks, placed
from plait.policy.placement.e2 import e2
from plait.policy.placement.least_delay import least_delay
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.types import Call, Placement, PlacementReason


class Policy(Protocol):
    """How the engines of calls are chosen."""

    @property
    def place(self) -> Callable[[Call, Situation], Placement]:
        """Chooses the engine of a call. Changes nothing."""

    def age(self, tree: PrefixTree, groups: Callable[[], Sequence[Sequence[EngineView]]], now_s: float) -> None:
        """Do what is due about once a second.

        `groups` returns the engines that take calls. Those of a group serve the same models.
        """


@dataclass(frozen=True, slots=True)
class Plain:
    """A policy that is one function, `place`. The tree may be tidied: it keeps no node."""

    place: Callable[[Call, Situation], Placement]

    def age(self, tree: PrefixTree, groups: Callable[[], Sequence[Sequence[EngineView]]], now_s: float) -> None:
        """Tidy the prefix tree."""
        del groups, now_s
        tree.tidy()


def round_robin(call: Call, situation: Situation) -> Placement:
    """Each engine in turn."""
    engine = situation.engines[situation.turn % len(situation.engines)]
    return placed(call, engine, PlacementReason.ROUND_ROBIN, cached_blocks(call, situation, engine))


def least_outstanding(call: Call, situation: Situation) -> Placement:
    """The engine with the fewest outstanding calls; ties: in turn."""
    fewest = min(engine.outstanding for engine in situation.engines)
    idle = [engine for engine in situation.engines if engine.outstanding == fewest]
    engine = idle[situation.turn % len(idle)]
    return placed(call, engine, PlacementReason.LEAST_OUTSTANDING, cached_blocks(call, situation, engine))


POLICIES: dict[str, Policy] = {
    "plait": Plain(least_delay),
    "e2": Plain(e2),
    "round_robin": Plain(round_robin),
    "least_outstanding": Plain(least_outstanding),
}


def continued(engine_id: str, call: Call, situation: Situation) -> Placement | None:
    """The placement of `call` on this engine; None if that is not among those of the situation."""
    for engine in situation.engines:
        if engine.engine_id == engine_id:
            return placed(call, engine, PlacementReason.CONTINUE, cached_blocks(call, situation, engine))
    return None
