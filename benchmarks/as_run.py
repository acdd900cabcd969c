"""Promises on an engine as engines run: `python -m benchmarks as_run [--quick] [--seeds N...]`.

In virtual time, on one embedded engine core: short calls with a TTFT and a TPOT arrive beside long prompts without a
promise. The engine plans one iteration ahead or not, and may take a while for any iteration with a prompt (the step).
What the `slo` scheduler is told of the engine is right, or wrong by a factor, or lacks the step, or is nothing.
`fcfs`, as stock engines plan, serves the same calls. Then the curve: promises kept against long prompts' TTFT, by the
share of the arrivals' TTFT slack that an iteration may take.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Final

from benchmarks.mixed_prompts import Lengths, MixedCall
from benchmarks.running.command import Experiment, conduct, parser
from benchmarks.running.report import Report, table
from benchmarks.schedulers.engine_run import Run, run
from plait.backends.profiles import load_profile
from plait.lab.simulation.claim import Claim
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.in_order import Fcfs
from plait.policy.scheduling.iteration_model import scaled
from plait.policy.scheduling.moment import SloSettings
from plait.policy.scheduling.plan import LocalScheduler
from plait.policy.scheduling.slo_scheduler import SloScheduler
from plait.policy.types import NO_SLO, Slo

PROFILE: Final = "h200-llama-8b"
BATCH_TOKENS: Final = 2048
KV_TOKENS: Final = 393_216
LONG, SHORT = Lengths(16_000, 64), Lengths(500, 32)
PERIOD: Final = 1.6
"""Long prompts come so many of their prefills apart."""
SHORT_SHARE: Final = 0.2
"""The share of the engine's capacity that short prompts take."""
JITTER: Final = 0.05
"""Iterations vary by so much, either way."""
SECONDS: Final = 40.0
QUICK_SECONDS: Final = 30.0
SEEDS: Final = (1, 2, 3)

STEPS_S: Final = (0.0, 0.015, 0.029)
TPOTS_S: Final = (0.027, 0.032, 0.050)
TTFTS: Final[Mapping[int, float]] = {1: 4.0, 0: 3.0}
"""The TTFT in unloaded ones, by how far the engine plans ahead."""
STOCK: Final = "stock"
TOLD: Final[Mapping[str, float | None]] = {
    "told": 1.0,
    "half": 0.5,
    "1.8 times": 1.8,
    "with its step": 1.0,
    "nothing": None,
}
"""What `slo` is told: the profile's times, multiplied; None: nothing."""
SHARES: Final = (1 / 2, 1 / 3, 1 / 4)


@dataclass(frozen=True, slots=True)
class Task:
    """The calls of a seed, on an engine, served by `stock` or by `slo` with what it is told."""

    ahead: int
    step_s: float
    tpot_s: float
    system: str
    seed: int
    share: float | None = None
    """The share of the slack that an iteration may take, in place of the shipped ones."""


@dataclass(frozen=True, slots=True)
class Figures:
    kept: float
    """The share of short calls that met both."""
    long_ttft_s: float
    """The median."""
    ttft_p99: float
    """The 99th percentile of short calls' TTFTs over the promised one."""
    ends_s: float


class Told(SloScheduler):
    """`slo`, told `costs` in place of the engine's own model."""

    def __init__(self, costs: CostModel | None, settings: SloSettings) -> None:
        super().__init__(settings)
        if costs is not None:
            super().expect(costs)

    def expect(self, costs: CostModel) -> None:
        """Not told."""


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Makes a runner in a worker process."""

    seconds: float

    def __call__(self, traces: Path) -> Runner:
        """The runner; there are no traces."""
        del traces
        return Runner(self.seconds)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks of so many seconds of arrivals."""

    seconds: float

    def __call__(self, task: Task) -> Figures:
        """Serve the calls."""
        engine = replace(load_profile(PROFILE).cost_model(), step_s=task.step_s)
        ttft_s = TTFTS[task.ahead] * engine.prefill_time_s(SHORT.prompt_tokens)
        calls = draw(engine, Slo(ttft_s=ttft_s, tpot_s=task.tpot_s), self.seconds, task.seed)
        finished = run(
            scheduler(task, engine),
            *(calls, engine),
            kv_tokens=KV_TOKENS,
            max_batch_tokens=BATCH_TOKENS,
            ahead=task.ahead,
            jitter=JITTER,
            seed=task.seed,
        )
        return figures(finished, ttft_s)


def scheduler(task: Task, engine: CostModel) -> LocalScheduler:
    """The scheduler of a task's system."""
    if task.system == STOCK:
        return Fcfs()
    factor, step_s = TOLD[task.system], engine.step_s if task.system == "with its step" else 0.0
    settings = SloSettings() if task.share is None else SloSettings(slack_shares=(task.share, task.share))
    return Told(None if factor is None else scaled(engine, factor, factor, step_s), settings)


def draw(engine: CostModel, promised: Slo, seconds: float, seed: int) -> list[MixedCall]:
    """Long prompts at a steady rate, and short calls that arrive at random."""
    chance, chunk = random.Random(seed), BATCH_TOKENS
    begun = range(0, LONG.prompt_tokens, chunk)
    long_s = sum(engine.prefill_time_s(min(chunk, LONG.prompt_tokens - start), start) for start in begun)
    arrivals = [(number * PERIOD * long_s, LONG) for number in range(int(seconds / PERIOD / long_s))]
    rate_per_s = SHORT_SHARE * LONG.prompt_tokens / long_s / SHORT.prompt_tokens
    at_s = chance.expovariate(rate_per_s)
    while at_s < seconds:
        arrivals.append((at_s, SHORT))
        at_s += chance.expovariate(rate_per_s)
    arrivals.sort(key=lambda arrival: arrival[0])
    return [
        MixedCall(number, at_s, lengths, lengths is LONG, NO_SLO if lengths is LONG else promised, feasible=True)
        for number, (at_s, lengths) in enumerate(arrivals)
    ]


def figures(finished: Run, ttft_s: float) -> Figures:
    """The figures of a run."""
    short = [record for record in finished.records if not record.call.long_source]
    ttfts = sorted(record.ttft_s / ttft_s for record in short)
    return Figures(
        kept=fmean(record.met for record in short),
        long_ttft_s=median(record.ttft_s for record in finished.records if record.call.long_source),
        ttft_p99=ttfts[int(0.99 * len(ttfts))],
        ends_s=max(record.finished_s for record in finished.records),
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """The means over seeds of `slo` on an engine; long prompts' TTFT and tokens a second over stock's."""

    kept: float
    ttft_p99: float
    long: float
    tokens: float


Found = Mapping[Task, Figures]


def cell(found: Found, task: Task, seeds: Sequence[int]) -> Cell:
    """The cell of a task's system."""
    ours = [found[replace(task, seed=seed)] for seed in seeds]
    stock = [found[replace(task, system=STOCK, share=None, seed=seed)] for seed in seeds]
    return Cell(
        kept=fmean(one.kept for one in ours),
        ttft_p99=fmean(one.ttft_p99 for one in ours),
        long=fmean(one.long_ttft_s for one in ours) / fmean(one.long_ttft_s for one in stock),
        tokens=fmean(theirs.ends_s / one.ends_s for one, theirs in zip(ours, stock, strict=True)),
    )


def tasks(seeds: Sequence[int], *, quick: bool) -> list[Task]:
    """All tasks: the table's, then the curve's."""
    systems = (STOCK, "told", "nothing") if quick else (STOCK, *TOLD)
    tpots_s = (TPOTS_S[0], TPOTS_S[-1]) if quick else TPOTS_S
    aheads = (1,) if quick else tuple(TTFTS)
    made = [Task(*one) for one in product(aheads, STEPS_S, tpots_s, systems, seeds)]
    if not quick:
        made += [
            Task(ahead, step_s, TPOTS_S[0], "told", seed, share)
            for ahead, step_s, share, seed in product(TTFTS, STEPS_S, SHARES, seeds)
        ]
    return made


def report(seeds: Sequence[int], found: Found) -> Report:
    """The table, the curve and the claims."""
    ours = {
        replace(task, seed=0): cell(found, task, seeds)
        for task in found
        if task.system != STOCK and task.seed == seeds[0]
    }
    shipped = {task: one for task, one in ours.items() if task.share is None}
    return Report(
        lines=[*_table(shipped, found, seeds), "", *_curve({task: one for task, one in ours.items() if task.share})],
        claims=list(claims(shipped)),
        results=[{**asdict(task), **asdict(one)} for task, one in ours.items()],
        inputs={"profile": PROFILE, "batch tokens": BATCH_TOKENS, "jitter": JITTER},
    )


def claims(cells: Mapping[Task, Cell]) -> Iterator[Claim]:
    """What holds in each cell, whatever the scheduler is told."""
    for step_s in STEPS_S:
        name = f"step {step_s * 1e3:g} ms"
        of_step = {task: one for task, one in cells.items() if task.step_s == step_s}
        for tpot_s in dict.fromkeys(task.tpot_s for task in of_step):
            kept, where = min((one.kept, _where(task)) for task, one in of_step.items() if task.tpot_s == tpot_s)
            least = 0.97 if step_s == STEPS_S[-1] else 0.87 if tpot_s == TPOTS_S[-1] else 0.92
            yield Claim(f"kept, {name}, TPOT {tpot_s * 1e3:g} ms, at its worst", kept, least=least, where=where)
        long, where = max((one.long, _where(task)) for task, one in of_step.items())
        most = 1.5 if step_s == STEPS_S[-1] else 1.6
        yield Claim(f"long prompts' TTFT / stock's, {name}, at its worst", long, most=most, where=where)
    tokens, where = min((one.tokens, _where(task)) for task, one in cells.items())
    yield Claim("tokens/s / stock's, at its worst", tokens, least=0.98, where=where)


def _where(task: Task) -> str:
    return f"{task.system}, ahead {task.ahead}, step {task.step_s * 1e3:g} ms, TPOT {task.tpot_s * 1e3:g} ms"


def _table(cells: Mapping[Task, Cell], found: Found, seeds: Sequence[int]) -> Iterator[str]:
    """Promises kept, long prompts' TTFT over stock's, and short calls' p99 of promised TTFTs."""
    systems = list(dict.fromkeys(task.system for task in cells))
    yield "Kept; long prompts' TTFT / stock's; p99 of short calls' TTFT / the promised."
    yield ""
    rows = []
    for task in (one for one in cells if one.system == systems[0]):
        stock = fmean(found[replace(task, system=STOCK, seed=seed)].kept for seed in seeds)
        of_systems = (cells[replace(task, system=system)] for system in systems)
        told = (f"{one.kept:.3f}; {one.long:.2f}; {one.ttft_p99:.2f}" for one in of_systems)
        rows.append((task.ahead, f"{task.step_s * 1e3:g}", f"{task.tpot_s * 1e3:g}", f"{stock:.2f}", *told))
    yield from table(("ahead", "step, ms", "TPOT, ms", STOCK, *systems), rows)


def _curve(cells: Mapping[Task, Cell]) -> Iterator[str]:
    """Promises kept against long prompts' TTFT, by the share of the slack that an iteration may take."""
    if not cells:
        return
    yield f"By share of the slack, TPOT {TPOTS_S[0] * 1e3:g} ms: kept; long prompts' TTFT and tokens/s over stock's."
    yield ""
    rows = []
    for task in (one for one in cells if one.share == SHARES[0]):
        of_shares = (cells[replace(task, share=share)] for share in SHARES)
        told = (f"{one.kept:.3f}; {one.long:.2f}; {one.tokens:.2f}" for one in of_shares)
        rows.append((task.ahead, f"{task.step_s * 1e3:g}", *told))
    yield from table(("ahead", "step, ms", *(f"{share:.2f}" for share in SHARES)), rows)


def main() -> int:
    """Run, print, write; returns 1 if a claim fails."""
    made = parser(__doc__, quick="one seed, ahead 1, short runs", seeds=SEEDS)
    arguments = made.parse_args()
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    runner = NewRunner(QUICK_SECONDS if arguments.quick else SECONDS)
    experiment = Experiment(tasks(seeds, quick=arguments.quick), runner, partial(report, seeds))
    return conduct("as_run", experiment, arguments)


if __name__ == "__main__":
    sys.exit(main())
