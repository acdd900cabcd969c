"""The placement policies by their names in the configuration, and the two plain ones.

A policy reads the `Situation`, changes nothing, and returns a `Placement`, which the router books. Under every policy,
a call that continues another goes to the same engine, where its prompt is cached. See docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation, cached_prefix, placed
from plait.policy.placement.e2 import e2
from plait.policy.placement.least_delay import least_delay
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.types import Call, Compared, Placement, PlacementReason

Groups = Callable[[], Sequence[Sequence[EngineView]]]
"""Returns the engines that take calls, grouped by the models that they serve."""


def tidy(tree: PrefixTree, groups: Groups, now_s: float) -> None:
    """Merge nodes of the tree. A merge removes nodes, so a policy that keeps references to nodes has its own `age`."""
    del groups, now_s
    tree.tidy()


@dataclass(frozen=True, slots=True)
class Policy:
    """A placement policy."""

    name: str
    """The name in the configuration."""

    title: str
    """The name in tables."""

    place: Callable[[Call, Situation], Placement]
    """Chooses the engine of a call. Changes nothing."""

    keeps_sessions: bool = False
    """Whether a session's calls go where its context is cached. Only then holding sessions back helps the caches."""

    moves_waiting: bool = False
    """Whether a call may move from one engine's line to another engine that has room."""

    age: Callable[[PrefixTree, Groups, float], None] = tidy
    """Periodic work, called about once a second with the time."""


def by_name(*policies: Policy) -> dict[str, Policy]:
    return {policy.name: policy for policy in policies}


def round_robin(call: Call, situation: Situation) -> Placement:
    engine = situation.engines[situation.turn % len(situation.engines)]
    return placed(call, engine, PlacementReason.ROUND_ROBIN, cached_prefix(call, situation, engine))


def least_outstanding(call: Call, situation: Situation) -> Placement:
    """The engine with the fewest outstanding calls; ties: in turn."""
    fewest = min(engine.outstanding for engine in situation.engines)
    idle = [engine for engine in situation.engines if engine.outstanding == fewest]
    engine = idle[situation.turn % len(idle)]
    return placed(call, engine, PlacementReason.LEAST_OUTSTANDING, cached_prefix(call, situation, engine))


POLICIES: Final = by_name(
    Policy("plait", "plait", least_delay, keeps_sessions=True, moves_waiting=True),
    Policy("e2", "e2", e2),
    Policy("round_robin", "round robin", round_robin),
    Policy("least_outstanding", "least outstanding", least_outstanding),
)
"""The built-in policies. `gateway/config/placement_policy.py` also loads an operator's own."""


_CONTINUES: Final = Compared("continues")


def continued(engine_id: str, call: Call, situation: Situation) -> Placement | None:
    """The placement of `call` on this engine; None if the engine is not eligible."""
    for engine in situation.engines:
        if engine.engine_id == engine_id:
            cached_blocks = cached_prefix(call, situation, engine)
            return placed(call, engine, PlacementReason.CONTINUE, cached_blocks, compared=_CONTINUES)
    return None
