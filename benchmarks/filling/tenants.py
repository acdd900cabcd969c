"""Three tenants, one of which sends twenty times as much: their calls, and what comes of these in virtual time.

Each tenant has its share of a load, in the saturation of calls of its own shape: the calls a second that are completed
if all come at once. So what the light tenants send does not change with what the heavy one sends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from operator import attrgetter
from statistics import median
from typing import Final

from benchmarks.filling.systems import ADMISSION, NONE, FleetSize, systems
from benchmarks.filling.workloads import EMPTY, FIRST_UNIQUE_ID, TOOL_LENGTHS, Lengths, extended, zipf
from plait.lab.simulation.compare import percentile
from plait.lab.simulation.simulate import CallRecord, Prompt, SimulatedCall
from plait.policy.types import Objective, Slo

HEAVY: Final = "heavy"
WEIGHTS: Final = {HEAVY: 20, "light-1": 1, "light-2": 1}
"""Each tenant's part of the load, relative to the others'."""
LOAD: Final = 1.9
SECONDS: Final = 60.0
SATURATION_CALLS: Final = 400
"""By engine."""
LOOKS_S: Final = (12.0, 20.0, 30.0)
"""When the lines are looked at."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Calls with one of some shared prefixes, by Zipf's law. All lengths are in tokens.

    The token ids of its prefixes are from `first_id` on.
    """

    prefixes: int
    prefix_tokens: tuple[int, int]
    lengths: Lengths
    first_id: int

    def prefix_lengths(self) -> list[int]:
        """The length of each prefix."""
        dice = random.Random("prefixes")
        return [dice.randint(*self.prefix_tokens) for _ in range(self.prefixes)]


SHAPES: Final[Mapping[str, Shape]] = {
    "chat": Shape(1, (100, 100), Lengths((50, 1_500), (20, 600), 180), 0),
    "tools": Shape(200, (1_000, 8_000), TOOL_LENGTHS, 1_000),
    "small": Shape(1, (16, 16), Lengths((4, 84), (20, 100), 60), 2_000),
    "long": Shape(1, (100, 100), Lengths((8_500, 8_500), (60, 160), 100), 3_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One run of tenants whose calls have a `shape`; those of the heavy tenant the shape `flood`, if there is one.

    With a `ttft_s`, a `jct_s` or an `objective`, each call of the heavy tenant has it; each call of the others has
    `light_ttft_s`. Not `fair`: all calls are one tenant's, of three `conversations` if so said.
    """

    shape: str
    load: float
    seconds: float
    seed: int
    engines: int = 1
    flood: str | None = None
    ttft_s: float | None = None
    jct_s: float | None = None
    light_ttft_s: float | None = None
    objective: Objective | None = None
    fair: bool = True
    conversations: bool = False
    system: str = ADMISSION

    @property
    def base(self) -> Contest:
        """What it is compared with: a heavy tenant that only sends more, or for one tenant, no admission."""
        if self.fair:
            return replace(self, flood=None, ttft_s=None, jct_s=None, objective=None)
        return replace(self, system=NONE)

    def shape_of(self, tenant: str) -> Shape:
        """Of the calls of a tenant."""
        return SHAPES[self.flood if self.flood and tenant == HEAVY else self.shape]


@dataclass(frozen=True, slots=True)
class Asked:
    """A call: who sends it when, and its lengths."""

    at_s: float
    tenant: str
    prefix: int
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What came of a run in virtual time: times in seconds.

    `light_kept` is the share of the light calls whose TTFT was kept. `calls_per_s` is over the time until the last call
    has ended, and `longest_wait_s` the longest TTFT of any call. `lines` has the most and the fewest calls that wait
    for one engine, by the time at which they were counted.
    """

    light_calls: int
    light_lost: int
    light_kept: float
    light_ttft_p50_s: float
    light_ttft_p90_s: float
    light_ttft_p99_s: float
    heavy_calls: int
    heavy_lost: int
    heavy_ttft_p50_s: float
    heavy_ttft_p90_s: float
    calls_per_s: float
    longest_wait_s: float
    lines: Mapping[float, tuple[int, int]]


@cache
def saturation_per_s(shape: Shape, engines: int) -> float:
    """The calls a second that are completed in virtual time if all come at once."""
    dice = random.Random(f"saturation of {shape.first_id}")
    asked = zipf(shape.prefixes, dice)
    calls = [
        _simulated(Asked(0.0, "", next(asked), *_draw(shape, dice)), shape, number)
        for number in range(engines * SATURATION_CALLS)
    ]
    _, simulation = systems(FleetSize(engines=engines))[NONE](0)
    return len(calls) / max(record.finished_s for record in simulation.run(calls))


def calls_of(contest: Contest) -> list[Asked]:
    """The calls of a run, in the order of their times."""
    return sorted((call for tenant in WEIGHTS for call in _calls_of(contest, tenant)), key=attrgetter("at_s"))


def _calls_of(contest: Contest, tenant: str) -> Iterator[Asked]:
    shape, dice, at_s = contest.shape_of(tenant), random.Random(f"{tenant} {contest.seed}"), 0.0
    share = WEIGHTS[tenant] / sum(WEIGHTS.values())
    rate_per_s = contest.load * share * saturation_per_s(shape, contest.engines)
    asked = zipf(shape.prefixes, dice)
    while (at_s := at_s + dice.expovariate(rate_per_s)) < contest.seconds:
        yield Asked(at_s, tenant, next(asked), *_draw(shape, dice))


def run_tenants(contest: Contest) -> TenantFigures:
    """Run the calls of all three tenants."""
    calls = [
        _of(contest, call, _simulated(call, contest.shape_of(call.tenant), number))
        for number, call in enumerate(calls_of(contest))
    ]
    _, simulation = systems(FleetSize(engines=contest.engines))[contest.system](contest.seed)
    records = simulation.run(calls)
    light, heavy = ([one for one in records if (one.prefix == HEAVY) is is_heavy] for is_heavy in (False, True))
    light_s, heavy_s = [record.ttft_s for record in light], [record.ttft_s for record in heavy]
    heavy_calls = sum(call.prefix == HEAVY for call in calls)
    return TenantFigures(
        light_calls=len(calls) - heavy_calls,
        light_lost=len(calls) - heavy_calls - len(light),
        light_kept=sum(one_s <= (contest.light_ttft_s or inf) for one_s in light_s) / (len(calls) - heavy_calls),
        light_ttft_p50_s=median(light_s),
        light_ttft_p90_s=percentile(light_s, 0.9),
        light_ttft_p99_s=percentile(light_s, 0.99),
        heavy_calls=heavy_calls,
        heavy_lost=heavy_calls - len(heavy),
        heavy_ttft_p50_s=median(heavy_s),
        heavy_ttft_p90_s=percentile(heavy_s, 0.9),
        calls_per_s=len(records) / max(record.finished_s for record in records),
        longest_wait_s=max(record.ttft_s for record in records),
        lines={at_s: _lines(records, at_s) for at_s in LOOKS_S},
    )


def _draw(shape: Shape, dice: random.Random) -> tuple[int, int]:
    """The tokens of a question and its answer."""
    return shape.lengths.draw_question(dice), shape.lengths.draw_answer(dice)


@cache
def _prefixes(shape: Shape) -> list[Prompt]:
    return [extended(EMPTY, number, tokens) for number, tokens in enumerate(shape.prefix_lengths(), shape.first_id)]


def _simulated(call: Asked, shape: Shape, number: int) -> SimulatedCall:
    """A call with its prompt. Its `prefix` names its tenant, too: not all calls tell it to the gateway."""
    prompt = extended(_prefixes(shape)[call.prefix], FIRST_UNIQUE_ID + number, call.question_tokens)
    return SimulatedCall(call.at_s, prompt, call.answer_tokens, prefix=call.tenant, tenant=call.tenant)


def _of(contest: Contest, call: Asked, simulated: SimulatedCall) -> SimulatedCall:
    """The call as its tenant sends it in this contest."""
    if not contest.fair:
        simulated = replace(simulated, tenant=HEAVY, session=call.tenant if contest.conversations else "")
    is_heavy = call.tenant == HEAVY
    slo = Slo(ttft_s=contest.ttft_s, jct_s=contest.jct_s) if is_heavy else Slo(ttft_s=contest.light_ttft_s)
    return replace(simulated, slo=None if slo == Slo() else slo, objective=contest.objective if is_heavy else None)


def _lines(records: Sequence[CallRecord], at_s: float) -> tuple[int, int]:
    """The most and the fewest calls that wait for an engine, of those that it is sent later."""
    waiting = Counter({record.engine_id: 0 for record in records})
    waiting.update(record.engine_id for record in records if record.arrived_s <= at_s < record.sent_s)
    return max(waiting.values()), min(waiting.values())
