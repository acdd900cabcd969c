"""What the plugin adds to the CPU time of vLLM's `schedule()`: `python -m benchmarks.vllm_scheduler_cost`.

Run by the Python of an environment with vLLM; no model is loaded. Stock and planned schedulers, with the same calls in
the same state, take turns step by step, so that whatever else the machine does meets both. Reported is the median of
the differences in process CPU time, and both medians.

Every step is one of an engine under load: 64 calls decode, the rest of the budget prefills, and the waiting calls
(2,000 prompt tokens each, the first half of most of them cached) are looked through for admission. For `slo` every call
has a TTFT and a TPOT; the stock scheduler is sent them too, and ignores them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RUNNING = 64
PROMPT_TOKENS = 2000
SHARED_TOKENS = 1024
BLOCK_TOKENS = 16
BATCH_TOKENS = 2048
"""The defaults of vLLM."""
WARM_UP_STEPS = 20
TARGETS_MS = {256: 0.5, 2000: 10.0}
"""The most that may be added to a step, in milliseconds, by number of waiting calls."""
POLICIES = ("fcfs", "hit_ratio", "longest_prefix", "slo")
TTFTS_S = (1.0, 60.0)
TPOT_MS = 187.5
"""Objectives as those of `plan_cost`."""


@dataclass(frozen=True)
class Cost:
    """Medians over the measured steps, in milliseconds of process CPU time."""

    policy: str
    waiting: int
    running: int
    stock_ms: float
    planned_ms: float
    added_ms: float
    added_p95_ms: float


def main() -> None:
    """Measure, print a table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--steps", type=int, default=200, help="steps measured for each row")
    parser.add_argument("--asynchronous", action="store_true", help="on vLLM's AsyncScheduler")
    arguments = parser.parse_args()
    costs = []
    print(f"{'policy':<16}{'waiting':>8}{'running':>8}{'stock':>10}{'planned':>10}{'added':>10}{'p95':>10}   ms a step")
    for policy in POLICIES:
        for waiting in TARGETS_MS:
            cost = measure(policy, waiting, arguments.steps, asynchronous=arguments.asynchronous)
            costs.append(cost)
            print(
                f"{policy:<16}{waiting:>8}{cost.running:>8}{cost.stock_ms:>10.3f}{cost.planned_ms:>10.3f}"
                f"{cost.added_ms:>10.3f}{cost.added_p95_ms:>10.3f}"
            )
    claims = [_claim(cost) for cost in costs]
    for claim in claims:
        print(f"{'holds' if claim['holds'] else 'FAILS'}: {claim['name']}: {claim['value']} (target {claim['target']})")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"costs": [asdict(cost) for cost in costs], "claims": claims}, indent=2))
    sys.exit(not all(claim["holds"] for claim in claims))


def measure(policy: str, waiting: int, steps: int, *, asynchronous: bool) -> Cost:
    """Two engines in the same state, stepped in turns; one of them planned by `policy`."""
    settings: tuple[dict[str, Any] | None, ...] = (None, {"scheduler": policy})
    promised = policy == "slo"
    engines = [_LoadedEngine(plait, waiting, promised=promised, asynchronous=asynchronous) for plait in settings]
    times_ms: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    for step in range(steps + WARM_UP_STEPS):
        for turn in (0, 1) if step % 2 else (1, 0):
            elapsed_ms = engines[turn].timed_step()
            if step >= WARM_UP_STEPS:
                times_ms[turn].append(elapsed_ms)
    gc.enable()
    added = sorted(planned - stock for stock, planned in zip(*times_ms, strict=True))
    medians_ms = [statistics.median(times) for times in (*times_ms, added)]
    p95_ms = added[int(0.95 * len(added))]
    return Cost(policy, waiting, engines[1].running, *(round(ms, 4) for ms in (*medians_ms, p95_ms)))


class _LoadedEngine:
    """An engine whose waiting calls are made up again after each step."""

    def __init__(self, plait: dict[str, Any] | None, waiting: int, *, promised: bool, asynchronous: bool) -> None:
        from e2e.vllm.unit.engine import Engine, Setup  # noqa: PLC0415 - only where vLLM is

        setup = Setup(
            folder=Path(tempfile.mkdtemp()),
            asynchronous=asynchronous,
            blocks=60_000,
            block_tokens=BLOCK_TOKENS,
            max_batch_tokens=BATCH_TOKENS,
            max_running=RUNNING + 8,
            plait=plait,
        )
        self._engine, self._waiting, self._promised = Engine(setup), waiting, promised
        self._dice = random.Random(1)
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(32)]
        for prefix in self._prefixes:
            self._add([*prefix, 1], 1)
        self._engine.run()
        for _ in range(RUNNING):
            self._add(self._tokens(100), 4000)
        while self._engine.scheduler.waiting or any(call.is_prefill_chunk for call in self._engine.scheduler.running):
            self._engine.step()
        self._refill()

    @property
    def running(self) -> int:
        return len(self._engine.scheduler.running)

    def timed_step(self) -> float:
        """Milliseconds of CPU time in `schedule()`."""
        began_s = time.process_time()
        output = self._engine.scheduler.schedule()
        elapsed_s = time.process_time() - began_s
        self._engine.finish_step(output)
        self._refill()
        return elapsed_s * 1e3

    def _refill(self) -> None:
        while len(self._engine.scheduler.waiting) < self._waiting:
            prefix = self._dice.choice(self._prefixes) if self._dice.random() < 0.8 else []
            self._add([*prefix, *self._tokens(PROMPT_TOKENS - len(prefix))], 1)

    def _add(self, prompt: list[int], output_tokens: int) -> None:
        objectives: dict[str, Any] = {"plait_ttft_ms": self._dice.uniform(*TTFTS_S) * 1e3, "plait_tpot_ms": TPOT_MS}
        self._engine.add(prompt, output_tokens, **(objectives if self._promised else {}))

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(1000) for _ in range(count)]


def _claim(cost: Cost) -> dict[str, Any]:
    target_ms = TARGETS_MS[cost.waiting]
    return {
        "name": f"{cost.policy}: CPU time added to a step with {cost.waiting} waiting and {cost.running} running calls",
        "value": f"{cost.added_ms} ms",
        "target": f"<= {target_ms} ms",
        "holds": cost.added_ms <= target_ms,
    }


if __name__ == "__main__":
    main()
