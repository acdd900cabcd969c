"""Runs of placement policies on one workload, in virtual time, with admission as it ships."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

from benchmarks.filling.systems import FleetSize, simulated
from benchmarks.placing.baselines import STICKY
from benchmarks.placing.rivals import RIVALS
from benchmarks.placing.workloads import AGENT_STARTS_S, Turn, agents, open_loops
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.placement_policy import placement_policy
from plait.gateway.config.sections import AdmissionConfig
from plait.gateway.fleet.router import Router
from plait.lab.simulation.compare import percentile
from plait.lab.simulation.simulate import CallRecord, Ended, SimulatedCall, Simulation
from plait.policy.placement.policies import POLICIES as SHIPPED
from plait.policy.placement.policies import Policy, by_name

OURS: Final = "plait"
POLICIES: Final = {**by_name(SHIPPED[OURS]), **RIVALS}
KNOWN: Final = {**POLICIES, **by_name(STICKY)}
"""Policies that can be named, beside `package.module:name`."""
ENDLESS_KV, KNOWN_LENGTHS = "plait, endless KV", "plait, known lengths"
BOUNDS: Final = (ENDLESS_KV, KNOWN_LENGTHS)
"""Ours on engines that evict nothing, and told the length of each answer: what better guesses could gain."""
BASE: Final = "round_robin"
ENDLESS_TOKENS: Final = 10_000_000
STRONGEST: Final = ("smg", "llmd_latency", "dynamo_cost", "lmetric", "e2")
"""The rivals that are best, or nearly so, in some cell of equal engines."""

AT_ONCE: Final = "at once"
AGENTS: Final = "agents"
RATES: Final = {f"0.9 {BASE}": 0.9, "0.95 best": 0.95}
"""Loads: shares of the calls a second that round robin, or the best policy, completes if all come at once."""
RATES_PER_S: Final[Mapping[str, Sequence[float]]] = {"video": (8.5, 11.2), "loogle": (3.0,)}
"""Calls a second on `PLAIN_ENGINES` equal engines with one gateway, besides the shares: near saturation."""
PLAIN: Final = ""
PLAIN_ENGINES: Final = 4
COMES_COLD: Final = "one comes cold"
FLEETS: Final[Mapping[str, Mapping[str, Any]]] = {
    PLAIN: {},
    "2 gateways": {"gateways": 2},
    "4 gateways": {"gateways": 4},
    "half 3 times faster, told": {"faster": 3.0, "fast": 2},
    "half 3 times faster, not told": {"faster": 3.0, "fast": 2, "told": False},
    COMES_COLD: {},
}
"""What differs from equal engines behind one gateway, by name. See `FleetSize`.

One that comes cold takes no calls in the first third of the run, and has an empty cache then.
"""
SESSIONS_AN_ENGINE: Final = {"10 sessions an engine": 10, "15 sessions an engine": 15}
"""The agents' loads. A session that ends is followed by another one."""


LARGE_FLEET, LARGE_SHARE = 16, 0.25
"""A larger fleet has fewer calls an engine in a run."""


@dataclass(frozen=True, slots=True)
class Task:
    """All policies under all loads of a workload, for one seed. The `fleet` is one of `FLEETS`."""

    workload: str
    engines: int
    seed: int
    fleet: str = PLAIN

    @property
    def is_plain(self) -> bool:
        """Whether it is `PLAIN_ENGINES` equal engines behind one gateway."""
        return (self.engines, self.fleet) == (PLAIN_ENGINES, PLAIN)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long the runs are, and which policies are run. The first `warm_up` of the calls is in no time or share."""

    policies: tuple[str, ...]
    calls_an_engine: int = 150
    admission: bool = True
    warm_up: float = 0.25

    every_rival: bool = False
    """Also where a task is not `PLAIN_ENGINES` equal engines behind one gateway; else the strongest ones and `BASE`."""

    def policies_of(self, task: Task) -> tuple[str, ...]:
        """The policies of a task's runs."""
        if self.every_rival or task.is_plain:
            return self.policies
        return tuple(name for name in self.policies if name in (OURS, BASE, *STRONGEST))

    def calls(self, task: Task) -> int:
        """How many of a run."""
        share = 1.0 if task.engines <= LARGE_FLEET else LARGE_SHARE
        return round(share * self.calls_an_engine * task.engines)


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of a run: times in seconds, of the calls that were completed."""

    ttft_s: float
    ttft_p99_s: float
    e2e_s: float
    e2e_p99_s: float
    completed_per_s: float
    hit_rate: float
    largest_share: float
    refused: int


Runs = dict[str, dict[str, Figures]]
"""Figures by load and policy."""


class Runner:
    """Runs tasks."""

    def __init__(self, plan: Plan, traces: Path) -> None:
        self._plan = plan
        self._traces = traces
        self._workloads = open_loops(traces)

    def __call__(self, task: Task) -> Runs:
        """The figures of each load and policy."""
        policies = self._plan.policies_of(task)
        if task.workload == AGENTS:
            return {
                load: {name: self._agents(name, task, sessions * task.engines) for name in policies}
                for load, sessions in SESSIONS_AN_ENGINE.items()
            }
        workload, calls = self._workloads[task.workload], self._plan.calls(task)
        at_once = workload(calls, inf, task.seed)
        runs: Runs = {AT_ONCE: {name: self._open(name, task, at_once) for name in policies}}
        completed = {name: one.completed_per_s for name, one in runs[AT_ONCE].items() if name not in BOUNDS}
        saturations = (completed.get(BASE, max(completed.values())), max(completed.values()))
        for (load, share), saturation_per_s in zip(RATES.items(), saturations, strict=True):
            coming = workload(calls, share * saturation_per_s, task.seed)
            runs[load] = {name: self._open(name, task, coming) for name in policies}
        if task.is_plain:
            for per_s in RATES_PER_S.get(task.workload, ()):
                coming = workload(calls, per_s, task.seed)
                runs[f"{per_s:g}/s"] = {name: self._open(name, task, coming) for name in policies}
        return runs

    def _open(self, policy: str, task: Task, calls: Sequence[SimulatedCall]) -> Figures:
        router, simulation = self._simulation(policy, task)
        if policy == KNOWN_LENGTHS:
            calls = [replace(call, output_limit=call.output_tokens) for call in calls]
        if task.fleet == COMES_COLD:
            first = next(iter(router.engines))
            simulation.at(0.0, partial(_drain, router, first, draining=True))
            simulation.at(calls[len(calls) // 3].arrives_s, partial(_drain, router, first, draining=False))
        simulation.run(calls)
        return figures(simulation, calls[round(self._plan.warm_up * len(calls))].arrives_s)

    def _agents(self, policy: str, task: Task, sessions: int) -> Figures:
        (_, simulation), coming = self._simulation(policy, task), agents(self._traces, task.seed)
        left = self._plan.calls(task)

        def go_on(turns: Sequence[Turn], _ended: CallRecord | None = None) -> None:
            nonlocal left
            if left <= 0:
                return
            first, *rest = turns or next(coming)
            left -= 1
            simulation.at(simulation.now_s + first.think_s, partial(send, first, partial(go_on, rest)))

        def send(turn: Turn, on_ended: Ended, now_s: float) -> None:
            simulation.send(replace(turn.call, arrives_s=now_s), on_ended)

        for number in range(sessions):
            simulation.at(number * AGENT_STARTS_S / sessions, lambda _now_s: go_on(()))
        simulation.run()
        arrivals_s = sorted(record.arrived_s for record in simulation.records)
        return figures(simulation, arrivals_s[round(self._plan.warm_up * len(arrivals_s))])

    def _simulation(self, policy: str, task: Task) -> tuple[Router, Simulation]:
        ahead_s, max_wait_s = (AHEAD_S, AdmissionConfig().max_wait_s) if self._plan.admission else (inf, inf)
        fleet = FleetSize(engines=task.engines, **FLEETS[task.fleet])
        if policy == ENDLESS_KV:
            fleet = replace(fleet, kv_tokens=ENDLESS_TOKENS)
        return simulated(fleet, policy_of(policy), ahead_s, max_wait_s)


def policy_of(name: str) -> Policy:
    """The policy of this name, or of `package.module:name`. Raises ValueError if there is none."""
    return placement_policy(OURS if name in BOUNDS else name, known=KNOWN)


def _drain(router: Router, engine_id: str, _now_s: float, *, draining: bool) -> None:
    router.health.drain(engine_id, draining=draining)


def figures(simulation: Simulation, warm_up_s: float) -> Figures:
    """Of a run that has ended; the calls that arrived before `warm_up_s` only count as completed."""
    counted = [record for record in simulation.records if record.arrived_s >= warm_up_s]
    ttfts_s, e2es_s = ([getattr(record, name) for record in counted] for name in ("ttft_s", "e2e_s"))
    shares = Counter(record.engine_id for record in counted)
    return Figures(
        ttft_s=sum(ttfts_s) / len(counted),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        e2e_s=sum(e2es_s) / len(counted),
        e2e_p99_s=percentile(e2es_s, 0.99),
        completed_per_s=len(simulation.records) / max(record.finished_s for record in simulation.records),
        hit_rate=sum(record.cached_tokens for record in counted) / sum(record.prompt_tokens for record in counted),
        largest_share=max(shares.values()) / len(counted),
        refused=len(simulation.refused),
    )
