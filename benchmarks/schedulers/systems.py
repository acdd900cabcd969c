"""The systems of the comparison by name: baselines, Plait's scheduler whole and in part, clairvoyant schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.schedulers.ablations import ABLATIONS, VARIANTS
from benchmarks.schedulers.baselines import ORCA_SEQUENCE_TOKENS, FastGen, Orca, SmallerBudget
from benchmarks.schedulers.clairvoyant import (
    Clairvoyant,
    Foresight,
    Order,
    earliest_deadline,
    least_kv_time,
    least_laxity,
    shortest_remaining,
)
from benchmarks.schedulers.engine_run import BLOCK_TOKENS
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.in_order import Fcfs
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import LocalScheduler
from plait.policy.scheduling.slo_scheduler import Phases, SloScheduler

MAX_BATCH_TOKENS = 2048
"""vLLM's default on an A100; what every system but Orca may compute in an iteration at most."""
FCFS_BUDGETS = (256, 512, 768, 2048)
"""768 is AccelGen's pivot forward size for OPT-13B and its token budget for Sarathi-Serve and FastGen."""
FASTGEN_TOKENS = 768

OURS = "slo"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a scheduler may be built for."""

    cost_model: CostModel
    kv_tokens: int

    @property
    def kv_blocks(self) -> int:
        """Of the KV cache."""
        return self.kv_tokens // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class System:
    """`kind` is baseline, ours, ablation, variant, clairvoyant, or registered: one that runs only if it is named.

    `whole_prompts` lifts the engine's budget.
    """

    name: str
    kind: str
    build: Callable[[Machine], LocalScheduler]
    whole_prompts: bool = False

    def max_batch_tokens(self, machine: Machine) -> int:
        """The engine's budget under this system."""
        return machine.kv_tokens + MAX_BATCH_TOKENS if self.whole_prompts else MAX_BATCH_TOKENS


def systems() -> dict[str, System]:
    """All of them; those that are not only registered in the order of the report."""
    every = [
        System("orca", "baseline", lambda machine: Orca(machine.kv_blocks, BLOCK_TOKENS), whole_prompts=True),
        System("orca_8k", "baseline", _orca_8k, whole_prompts=True),
        *(
            System(f"fcfs_{budget}", "baseline", partial(_fcfs, budget))
            for budget in FCFS_BUDGETS  # vLLM and Sarathi-Serve
        ),
        System("fastgen", "baseline", lambda _: FastGen(FASTGEN_TOKENS)),
        System("longest_prefix", "baseline", partial(_registered, "longest_prefix")),
        System(OURS, "ours", partial(_registered, OURS)),
        *(System(name, "ablation", partial(_ours, phases)) for name, phases in ABLATIONS.items()),
        *(System(name, "variant", partial(_ours, phases)) for name, phases in VARIANTS.items()),
        System("srpt", "clairvoyant", partial(_clairvoyant, shortest_remaining, triage=False)),
        System("edf", "clairvoyant", partial(_clairvoyant, earliest_deadline)),
        System("least_laxity", "clairvoyant", partial(_clairvoyant, least_laxity)),
        System("least_kv_time", "clairvoyant", partial(_clairvoyant, least_kv_time)),
        System("small_chunks", "clairvoyant", partial(_clairvoyant, least_kv_time, small_chunks=True)),
        System("few_lost", "clairvoyant", partial(_clairvoyant, least_kv_time, small_chunks=True, most_lost=4)),
    ]
    registered = {name: System(name, "registered", partial(_registered, name)) for name in SCHEDULERS}
    return registered | {system.name: system for system in every}


def _registered(name: str, machine: Machine) -> LocalScheduler:
    del machine
    return SCHEDULERS[name]()


def _orca_8k(machine: Machine) -> LocalScheduler:
    return Orca(machine.kv_blocks, BLOCK_TOKENS, ORCA_SEQUENCE_TOKENS)


def _fcfs(budget: int, machine: Machine) -> LocalScheduler:
    del machine
    return SmallerBudget(Fcfs(), budget)


def _ours(phases: Phases, machine: Machine) -> LocalScheduler:
    del machine
    return SloScheduler(phases=phases)


def _clairvoyant(
    order: Order,
    machine: Machine,
    *,
    triage: bool = True,
    small_chunks: bool = False,
    most_lost: int | None = None,
) -> LocalScheduler:
    foresight = Foresight(machine.cost_model, machine.kv_blocks, BLOCK_TOKENS)
    return Clairvoyant(foresight, order, triage=triage, small_chunks=small_chunks, most_lost=most_lost)
