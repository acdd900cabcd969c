"""The placement policies: what one is, all of them by their names in the configuration, and the plain ones.

A policy chooses the engine of a call. It reads the `Situation`, changes nothing, and returns a `Placement`. The router
books it. A call that continues another is placed on the same engine, under every policy: its prompt is cached there.
See docs/placement.md.
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
"""Returns the engines that take calls. Those of a group serve the same models."""


def tidy(tree: PrefixTree, groups: Groups, now_s: float) -> None:
    """Tidy the prefix tree. A merge takes nodes away: a policy that refers to some has an `age` of its own."""
    del groups, now_s
    tree.tidy()


@dataclass(frozen=True, slots=True)
class Policy:
    """How the engines of calls are chosen."""

    name: str
    """In the configuration."""

    title: str
    """In tables."""

    place: Callable[[Call, Situation], Placement]
    """Chooses the engine of a call. Changes nothing."""

    keeps_sessions: bool = False
    """A session's calls go where its context is, so sessions may be held for the caches' sake."""

    moves_waiting: bool = False
    """A call that waits for an engine may go to another one that gets room."""

    age: Callable[[PrefixTree, Groups, float], None] = tidy
    """Does what is due about once a second, at a time in seconds."""


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
"""The policies that the gateway has. `gateway/config/placement_policy.py` takes those of one's own, too."""


_CONTINUES: Final = Compared("continues")


def continued(engine_id: str, call: Call, situation: Situation) -> Placement | None:
    """The placement of `call` on this engine; None if that is not among those of the situation."""
    for engine in situation.engines:
        if engine.engine_id == engine_id:
            cached_blocks = cached_prefix(call, situation, engine)
            return placed(call, engine, PlacementReason.CONTINUE, cached_blocks, compared=_CONTINUES)
    return None
