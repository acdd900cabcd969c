"""The systems of the ablation: E2 with one mechanism after another, and `plait` with one part less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.placing.published import PublishedReplicas, PublishedShift, most_decoding
from benchmarks.placing.rebalancing import RebalancedE2, Replicas, Shift, spare_compute
from benchmarks.placing.routes import RouteReason, Routes
from benchmarks.placing.terms import TERMS, without
from plait.policy.placement.policies import Policy

FCFS: Final = "fcfs"
GROUPS: Final = "hit_ratio"
"""The engines' local schedulers without and with priority groups."""

SHIFTED: Final = (RouteReason.SHIFT.value, RouteReason.REPLICA.value)
BALANCED: Final = (RouteReason.DECODE_BALANCE.value,)

NewPolicy = Callable[[int], str | Policy]
"""Makes the policy of one run, from the length of a tree block in tokens."""


@dataclass(frozen=True, slots=True)
class Step:
    """One system. `before` is the step that it is compared with, and `reasons` are those of what it adds."""

    name: str
    new_policy: NewPolicy
    scheduler: str
    before: str | None = None
    reasons: tuple[str, ...] = ()


def _named(name: str) -> NewPolicy:
    return lambda _block_tokens: name


def _without(term: str) -> NewPolicy:
    return lambda _block_tokens: without(term)


def _composed(block_tokens: int, *, balanced: bool = False, published: tuple[str, ...] = ()) -> Policy:
    """E2 with shift and replicas, and decode balance if `balanced`. `published` names those that are not ours."""
    routes = Routes()
    replicas = (PublishedReplicas if "shift" in published else Replicas)(routes, block_tokens)
    shift = PublishedShift() if "shift" in published else Shift(routes, block_tokens)
    balance = most_decoding if "decode_balance" in published else spare_compute
    return RebalancedE2(routes, (replicas, shift), balance if balanced else None).policy


PUBLISHED_SHIFT: Final = "+ shift, replicate as published"
PUBLISHED_BALANCE: Final = "+ decode balance as published"

PAPER: Final = (
    Step("round robin", _named("round_robin"), FCFS),
    Step("+ E2", _named("e2"), FCFS, "round robin"),
    Step("+ shift, replicate", _composed, FCFS, "+ E2", SHIFTED),
    Step("+ decode balance", partial(_composed, balanced=True), FCFS, "+ shift, replicate", BALANCED),
    Step("+ priority groups", partial(_composed, balanced=True), GROUPS, "+ decode balance"),
)
"""The order of the paper (section 4.4), with our conditions."""

AS_PUBLISHED: Final = (
    Step(PUBLISHED_SHIFT, partial(_composed, published=("shift",)), FCFS, reasons=SHIFTED),
    Step(
        PUBLISHED_BALANCE,
        partial(_composed, balanced=True, published=("decode_balance",)),
        FCFS,
        reasons=BALANCED,
    ),
)
"""The same mechanisms under the published conditions alone."""

OURS: Final = {"+ shift, replicate": PUBLISHED_SHIFT, "+ decode balance": PUBLISHED_BALANCE}
"""Each mechanism with our conditions, and as published. All else is equal."""

SHIPPED: Final = "plait"
TERM_STEPS: Final = (
    Step(SHIPPED, _named(SHIPPED), GROUPS, "+ priority groups"),
    *(Step(f"plait without {term.removesuffix('_s')}", _without(term), GROUPS) for term in TERMS),
)

STEPS: Final = {step.name: step for step in (*PAPER, *AS_PUBLISHED, *TERM_STEPS)}
