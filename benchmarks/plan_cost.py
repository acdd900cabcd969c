"""CPU time of one plan of the local scheduler: `python -m benchmarks plan_cost`.

The embedded engine in a busy state, its cache full of shared prefixes, is planned for again and again; reported is the
median over plans that are all made in that state. The clock moves on between plans, so that remaining times differ.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from plait.backends.profiles import load_profile
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.simulation.claim import Claim
from plait.policy.prefix.block_hash import root_hash
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.types import Slo

TARGETS_MS = {256: 0.5, 5000: 15.0}
RUNNING = 64
PREFIX_TOKENS = 1024
ROOT = root_hash("m")


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of CPU time a plan. `promised` is the share of calls with objectives."""

    scheduler: str
    waiting: int
    running: int
    promised: float
    median_ms: float
    p95_ms: float


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__)
    parser.add_argument("--schedulers", default="fcfs,hit_ratio,slo")
    parser.add_argument("--plans", type=int, default=200, help="plans per figure (default: %(default)s)")
    arguments = parser.parse_args()
    costs = [
        measure(scheduler, waiting, promised, arguments.plans)
        for scheduler in arguments.schedulers.split(",")
        for waiting in TARGETS_MS
        for promised in ((1.0, 0.5) if scheduler == "slo" else (1.0,))
    ]
    lines = [
        f"{cost.scheduler:<15}{cost.waiting:>6} waiting {cost.running:>4} running {cost.promised:>5.0%} "
        f"with objectives: median {cost.median_ms:.3f} ms, p95 {cost.p95_ms:.3f} ms"
        for cost in costs
    ]
    claims = [_claim(cost) for cost in costs if cost.scheduler == "slo"]
    report = Report(lines=lines, claims=claims, results=[asdict(cost) for cost in costs], is_timed=True)
    return finish("plan_cost", report, arguments)


def measure(scheduler: str, waiting: int, promised: float, plans: int) -> Cost:
    """The cost of a scheduler's plans for one state of the engine."""
    engine = _busy_engine(waiting, promised)
    policy = SCHEDULERS[scheduler]()
    if hasattr(policy, "expect"):
        policy.expect(load_profile("a6000-mistral-7b").cost_model())
    times_ms = []
    gc.disable()
    for number in range(plans):
        now_s = 10.0 + number * 0.05
        began_s = time.process_time()
        policy.plan(now_s, engine.waiting, engine.running, engine.facts)
        times_ms.append((time.process_time() - began_s) * 1e3)
    gc.enable()
    times_ms.sort()
    median_ms, p95_ms = statistics.median(times_ms), times_ms[int(0.95 * plans)]
    return Cost(scheduler, waiting, len(engine.running), promised, round(median_ms, 4), round(p95_ms, 4))


def _busy_engine(waiting: int, promised: float) -> Engine:
    """64 decodes, and waiting calls of which two thirds share a cached prefix; free KV for some of them only."""
    dice = random.Random(1)
    settings = EngineSettings(name="e", model="m", kv_tokens=200_000, max_running_calls=RUNNING + 16)
    engine = Engine(settings, load_profile("a6000-mistral-7b").cost_model())
    prefixes = [[1000 + number] * PREFIX_TOKENS for number in range(8)]
    for number in range(RUNNING):
        engine.add(_call(f"running-{number}", 0.0, [*prefixes[number % 8], *[number] * 400], dice, promised))
    now_s = 0.0
    while engine.waiting or any(call.output_tokens == 0 for call in engine.running):
        now_s = engine.step(now_s).ends_s or now_s
    for number in range(waiting):
        own = [10_000 + number] * int(min(8000, dice.lognormvariate(6, 1)) + 1)
        prompt = [*dice.choice(prefixes), *own] if dice.random() < 2 / 3 else own
        engine.add(_call(f"waiting-{number}", dice.uniform(0.0, 10.0), prompt, dice, promised))
    return engine


def _call(name: str, now_s: float, prompt: list[int], dice: random.Random, promised: float) -> EmbeddedCall:
    chain, tree_chain = HashChain(16, ROOT, prompt), HashChain(64, ROOT, prompt)
    slo = Slo(ttft_s=dice.uniform(1.0, 60.0), tpot_s=0.1875) if dice.random() < promised else None
    return EmbeddedCall(name, now_s, len(prompt), slo=slo, chain=chain, tree_chain=tree_chain, final_output_tokens=4000)


def _claim(cost: Cost) -> Claim:
    calls = f"{cost.waiting} waiting and {cost.running} running calls, {cost.promised:.0%} with objectives"
    return Claim(f"slo: CPU time of a plan (ms) with {calls}", cost.median_ms, most=TARGETS_MS[cost.waiting])


if __name__ == "__main__":
    sys.exit(main())
