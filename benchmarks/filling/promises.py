"""Short calls with a promised time beside long prompts, in virtual time: what share of the promises is kept.

A long prompt takes an engine for more than a second, a short one for a few hundredths. So a promise is kept if short
calls pass the long prompts: in the gateway's lines, and in the engine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

from benchmarks.filling.systems import ADMISSION, FCFS, FCFS_ADMISSION, NONE, FleetSize, systems
from benchmarks.filling.workloads import EMPTY, FIRST_UNIQUE_ID, Lengths, extended
from plait.lab.simulation.compare import percentile
from plait.lab.simulation.simulate import CallRecord, Prompt, SimulatedCall
from plait.lab.simulation.workload import poisson_arrivals
from plait.policy.types import NO_SLO, Slo

SHORT: Final = "short"
LONG: Final = "long"
CHAT: Final = "chat"
"""The kinds of calls, as their `SimulatedCall.prefix`."""

SYSTEMS: Final = (NONE, ADMISSION, FCFS, FCFS_ADMISSION)
LOADS: Final = (0.5, 0.85, 1.0, 1.2)
JCT_LOAD: Final = 0.85
QUESTION_TOKENS: Final = (20, 80)
"""Of a call with one of several contexts."""
SECONDS: Final = 60.0
SATURATION_CALLS: Final = 150
"""By engine."""

OTHERS: Final[Mapping[str, Lengths]] = {
    LONG: Lengths((8_600, 8_600), (60, 160), 100),
    CHAT: Lengths((500, 2_000), (50, 400), 150),
}
"""The calls that are promised nothing."""
ANSWERS: Final = Lengths((100, 500), (60, 100), 80)
BRIEF_ANSWERS: Final = Lengths((100, 500), (20, 40), 30)
"""A lone engine takes up to a second for these: the JCTs can be kept."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The short calls: their lengths, and what is promised to each.

    At loads up to `most_load`, admission is wanted to keep the share `least` of the promises.
    """

    slo: Slo
    lengths: Lengths
    least: float
    most_load: float = inf

    def is_kept(self, record: CallRecord) -> bool:
        """Whether a completed call, of two tokens or more, had what was promised."""
        tpot_s = (record.e2e_s - record.ttft_s) / (record.output_tokens - 1)
        times_s = record.ttft_s, tpot_s, record.e2e_s
        return all(most_s is None or time_s <= most_s for time_s, most_s in zip(times_s, self.slo[:3], strict=True))


NO_JCT: Final = "no-jct"
PROMISES: Final[Mapping[str, Promise]] = {
    "ttft-0.3": Promise(Slo(ttft_s=0.3), ANSWERS, 0.99),
    "tpot-0.05": Promise(Slo(tpot_s=0.05), ANSWERS, 0.99, most_load=1.0),
    "jct-2.5": Promise(Slo(jct_s=2.5), BRIEF_ANSWERS, 0.95, JCT_LOAD),
    "jct-1.5": Promise(Slo(jct_s=1.5), BRIEF_ANSWERS, 0.90, JCT_LOAD),
    NO_JCT: Promise(NO_SLO, BRIEF_ANSWERS, 1.0, JCT_LOAD),
}
"""By name, with the time in seconds."""


@dataclass(frozen=True, slots=True)
class Callers:
    """Who calls: of each kind, the tenant, and how many calls it sends relative to the others.

    With these callers, no more than the share `least` of any promise is wanted.
    """

    tenants: Mapping[str, str]
    shares: Mapping[str, int]
    least: float = 1.0


CALLERS: Final[Mapping[str, Callers]] = {
    "one": Callers({SHORT: "a", LONG: "a"}, {SHORT: 40, LONG: 10}),
    "two": Callers({SHORT: "a", LONG: "b"}, {SHORT: 40, LONG: 10}),
    "bystander": Callers({SHORT: "a", LONG: "b", CHAT: "c"}, {SHORT: 40, LONG: 10, CHAT: 2}, least=0.95),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A run. `load` is the rate of arrival, in units of the saturation without a promise."""

    promise: str
    callers: str
    load: float
    system: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What came of a run; times in seconds, of completed calls.

    Rates are over the time until the last call has ended.
    """

    calls: int
    refused: int
    kept: float
    """The share of all short calls whose promise was kept. A refused call's is not."""
    ttft_p50_s: float
    ttft_p99_s: float
    """Of short calls."""
    long_ttft_p50_s: float
    completed_per_s: float
    tokens_per_s: float
    """Of the prompts and answers."""


Results = Mapping[Point, Kept]
Task = tuple[str, str, int]
"""A promise, callers and a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long the runs are, and of what. There are so many `contexts` of long prompts; 0: each has its own."""

    fleet: FleetSize
    systems: tuple[str, ...]
    loads: tuple[float, ...] = LOADS
    seconds: float = SECONDS
    contexts: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """The calls of a promise: short and long ones, and chat."""

    promise: Promise
    callers: Callers
    contexts: int
    seed: int

    def calls(self, number: int, rate_per_s: float) -> list[SimulatedCall]:
        """So many calls in the order of arrival. At an infinite rate, all come at once."""
        dice, callers = random.Random(f"promises {self.seed}"), self.callers
        contexts = [extended(EMPTY, context, OTHERS[LONG].draw_question(dice)) for context in range(self.contexts)]
        kinds = dice.choices(list(callers.shares), list(callers.shares.values()), k=number)
        arrivals_s = poisson_arrivals(number, rate_per_s, self.seed)
        return [
            self._call(kind, at_s, own_id, dice, contexts)
            for own_id, (kind, at_s) in enumerate(zip(kinds, arrivals_s, strict=True), FIRST_UNIQUE_ID)
        ]

    def _call(
        self, kind: str, at_s: float, own_id: int, dice: random.Random, contexts: Sequence[Prompt]
    ) -> SimulatedCall:
        """One call. A long one asks a question about one of the contexts, if there are any."""
        lengths = {**OTHERS, SHORT: self.promise.lengths}[kind]
        if kind == LONG and contexts:
            prompt = extended(dice.choice(contexts), own_id, dice.randint(*QUESTION_TOKENS))
        else:
            prompt = extended(EMPTY, own_id, lengths.draw_question(dice))
        slo = self.promise.slo if kind == SHORT and self.promise.slo != NO_SLO else None
        answer_tokens, tenant = lengths.draw_answer(dice), self.callers.tenants[kind]
        return SimulatedCall(at_s, prompt, answer_tokens, prefix=kind, slo=slo, tenant=tenant)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs every system at every load."""

    plan: Plan
    traces: Path

    def __call__(self, task: Task) -> dict[Point, Kept]:
        """The figures of a promise, at the loads at which something is wanted of it."""
        name, callers, seed = task
        plan, began_s = self.plan, perf_counter()
        workload = Workload(PROMISES[name], CALLERS[callers], plan.contexts, seed)
        plain = replace(workload, promise=replace(workload.promise, slo=NO_SLO))
        at_once = plain.calls(SATURATION_CALLS * plan.fleet.engines, inf)
        saturation_per_s = self._run(NONE, plain.promise, at_once, seed).completed_per_s
        found = {}
        for load in (load for load in plan.loads if load <= workload.promise.most_load):
            rate_per_s = load * saturation_per_s
            calls = workload.calls(round(rate_per_s * plan.seconds), rate_per_s)
            for system in plan.systems:
                found[Point(name, callers, load, system, seed)] = self._run(system, workload.promise, calls, seed)
        took_s = perf_counter() - began_s
        print(f"{name}, {callers}, seed {seed}: {saturation_per_s:.2f} calls/s; {took_s:.0f} s", file=sys.stderr)
        return found

    def _run(self, system: str, promise: Promise, calls: Sequence[SimulatedCall], seed: int) -> Kept:
        _, simulation = systems(self.plan.fleet)[system](seed)
        return _figures(promise, calls, simulation.run(calls))


def _figures(promise: Promise, calls: Sequence[SimulatedCall], completed: Sequence[CallRecord]) -> Kept:
    """Of the calls that arrived and the records of those that were completed."""
    short = [record for record in completed if record.prefix == SHORT]
    took_s = max(record.finished_s for record in completed)
    ttfts_s = [record.ttft_s for record in short]
    return Kept(
        calls=len(calls),
        refused=len(calls) - len(completed),
        kept=sum(map(promise.is_kept, short)) / sum(call.prefix == SHORT for call in calls),
        ttft_p50_s=median(ttfts_s),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        long_ttft_p50_s=median(record.ttft_s for record in completed if record.prefix == LONG),
        completed_per_s=len(completed) / took_s,
        tokens_per_s=sum(record.prompt_tokens + record.output_tokens for record in completed) / took_s,
    )
