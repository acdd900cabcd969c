"""The systems of the comparison by name: who runs the programs, what schedules in the engines, what places calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from plait.backends.profiles import load_profile
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.fleet.router import Router
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.simulation.simulate import Simulation
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.in_order import Fcfs
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import EngineFacts, LocalCall, LocalScheduler, Plan

MODEL = "m"
BLOCK_TOKENS = 16
LATENCY_TOKENS = 4096
"""What the running calls of a latency-oriented engine may hold together (Parrot, section 8.2)."""
OURS = "plait"
LATENCY = "latency"
THROUGHPUT = "throughput"
SHIPPED_POLICY = "plait"
"""The placement policy that ships; of one engine there is nothing to choose."""


class RunningTokensCap:
    """FCFS with chunked prefill that admits a call only while all running calls together hold `most_tokens` at most.

    A call counts with its prompt and what it has generated so far, shared or not; one that is longer than the limit
    runs alone. Admission is in the order of arrival: the first that does not fit holds up the others.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._fcfs = Fcfs()

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        """The plan of FCFS for those that may run."""
        held_tokens = sum(_tokens(call) for call in running)
        admitted: list[LocalCall] = []
        for call in waiting:
            held_tokens += _tokens(call)
            if held_tokens > self._most_tokens and (running or admitted):
                break
            admitted.append(call)
        return self._fcfs.plan(now_s, admitted, running, facts)


def _tokens(call: LocalCall) -> int:
    return call.prompt_tokens + call.output_tokens


@dataclass(frozen=True, slots=True)
class System:
    """`chained`: programs are given to the gateway whole and run by its executor; else by their clients, call by call.

    `prefix_caching` off: no call's blocks match another's. `deduced` off: the gateway chains, but nobody has told it
    what the values are wanted for.
    """

    name: str
    chained: bool
    scheduler: Callable[[], LocalScheduler]
    policy: str
    prefix_caching: bool = True
    deduced: bool = True


def systems() -> dict[str, System]:
    """All of them, in the order of the report."""
    every = [
        System(OURS, True, SCHEDULERS["slo"], SHIPPED_POLICY),
        System(LATENCY, False, lambda: RunningTokensCap(LATENCY_TOKENS), "least_outstanding"),
        System(THROUGHPUT, False, Fcfs, "least_outstanding"),
        System("latency_uncached", False, lambda: RunningTokensCap(LATENCY_TOKENS), "least_outstanding", False),
        System("throughput_uncached", False, Fcfs, "least_outstanding", False),
        System("plait_fcfs", True, Fcfs, "least_outstanding"),
        System("client_e2", False, Fcfs, "e2"),
        System("client_plait", False, Fcfs, SHIPPED_POLICY),
        System("plait_undeduced", True, SCHEDULERS["slo"], SHIPPED_POLICY, deduced=False),
    ]
    return {system.name: system for system in every}


@dataclass(frozen=True, slots=True)
class Machine:
    """The engines that every system runs on: so many of a cost profile, each with a KV cache of `kv_tokens`."""

    profile: str
    engines: int
    kv_tokens: int

    def cost_model(self) -> CostModel:
        """Of each engine."""
        return load_profile(self.profile).cost_model()


def simulation(system: System, machine: Machine) -> tuple[Simulation, Router]:
    """A fresh fleet under a system, and the router that places its calls."""
    costs = machine.cost_model()
    router = Router(system.policy)
    engines = {}
    for number in range(machine.engines):
        name = f"engine-{number}"
        router.add_engine(name, costs, kv_tokens=machine.kv_tokens)
        settings = EngineSettings(name=name, model=MODEL, kv_tokens=machine.kv_tokens, block_tokens=BLOCK_TOKENS)
        engines[name] = Engine(settings, costs, scheduler=system.scheduler())
    ahead_s = AHEAD_S if router.policy.moves_waiting else inf  # what the others stand for sends each call at once
    return Simulation(router, engines, MODEL, ahead_s=ahead_s), router
