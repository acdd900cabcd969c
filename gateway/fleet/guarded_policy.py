"""A guard around an operator's own placement policy: whatever the policy does, each call gets an eligible engine."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Final

import structlog

from plait.policy.costs.situation import Situation
from plait.policy.placement.policies import Groups, Policy, least_outstanding, tidy
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.types import Call, Placement

TELL_INTERVAL_S: Final = 60.0

log = structlog.get_logger(__name__)


class WrongPlacementError(ValueError):
    """A policy has returned something that is not a valid placement of the call."""


def guarded(policy: Policy) -> Policy:
    """The policy with a fallback to least outstanding calls, and to tidying the tree if its `age` raises.

    The fallback places a call if the policy raises, chooses an engine that is not eligible, or gives a reason that is
    not valid in a header. The failure is logged at most once a minute.
    """
    guard = _Guard(policy)
    return replace(policy, place=guard.place, age=guard.age)


class _Guard:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._told_s = -inf

    def place(self, call: Call, situation: Situation) -> Placement:
        try:
            return _checked(self._policy.place(call, situation), situation)
        except Exception as error:  # noqa: BLE001 - the operator's code may raise anything
            self._tell(error, situation.now_s)
            return least_outstanding(call, situation)

    def age(self, tree: PrefixTree, groups: Groups, now_s: float) -> None:
        try:
            self._policy.age(tree, groups, now_s)
        except Exception as error:  # noqa: BLE001 - the operator's code may raise anything
            self._tell(error, now_s)
            tidy(tree, groups, now_s)

    def _tell(self, error: Exception, now_s: float) -> None:
        if now_s - self._told_s >= TELL_INTERVAL_S:
            self._told_s = now_s
            log.error("placement policy failed", policy=self._policy.name, error=repr(error), exc_info=error)


def _checked(placement: object, situation: Situation) -> Placement:
    if not isinstance(placement, Placement):
        raise WrongPlacementError(f"expected a Placement, not {type(placement).__name__}")
    if all(engine.engine_id != placement.engine_id for engine in situation.engines):
        raise WrongPlacementError(f"engine {placement.engine_id!r} is none that the call may go to")
    reason: object = placement.reason
    if not (isinstance(reason, str) and reason and reason.isascii() and reason.isprintable()):
        raise WrongPlacementError(f"reason {reason!r}: expected printable ASCII")
    return placement
