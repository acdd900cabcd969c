"""What the plugin adds to the CPU time of SGLang's scheduling steps: `python -m benchmarks.sglang_scheduler_cost`.

The scheduler is the tests' stand-in, whose prefill pass is not SGLang's. So the hooks are timed, less the pass itself.
The cache's events, and our limits inside SGLang's adder, are not included.

Every step is one of an engine under load: 64 calls decode, the rest of the chunk prefills, and the calls wait with
2,000 prompt tokens each, the first half of most of them shared. For `slo` every call has a TTFT and a TPOT.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plait.backends.sglang.settings import Settings
from tests.backends.sglang.fake_scheduler import PAGE_TOKENS, Rank, Request, Setup

RUNNING = 64
PROMPT_TOKENS = 2000
SHARED_TOKENS = 1024
CHUNK_TOKENS = 2048
KV_TOKENS = 960_000
WARM_UP_STEPS = 20
TARGETS_MS = {256: 0.5, 2000: 10.0}
"""The most that may be added to a step, in milliseconds, by number of waiting calls."""
POLICIES = ("fcfs", "hit_ratio", "longest_prefix", "slo")
TTFTS_S = (1.0, 60.0)
TPOT_MS = 187.5
"""Objectives as those of `plan_cost`."""


@dataclass(frozen=True)
class Cost:
    """Figures of the measured steps, in milliseconds of process CPU time."""

    policy: str
    waiting: int
    running: int
    added_ms: float
    added_p95_ms: float


def main() -> None:
    """Measure, print a table and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--steps", type=int, default=200, help="steps measured for each row")
    arguments = parser.parse_args()
    costs = []
    print(f"{'policy':<16}{'waiting':>8}{'running':>8}{'added':>10}{'p95':>10}   ms a step")
    for policy in POLICIES:
        for waiting in TARGETS_MS:
            cost = measure(policy, waiting, arguments.steps)
            costs.append(cost)
            print(f"{policy:<16}{waiting:>8}{cost.running:>8}{cost.added_ms:>10.3f}{cost.added_p95_ms:>10.3f}")
    claims = [_claim(cost) for cost in costs]
    for claim in claims:
        print(f"{'holds' if claim['holds'] else 'FAILS'}: {claim['name']}: {claim['value']} (target {claim['target']})")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"costs": [asdict(cost) for cost in costs], "claims": claims}, indent=2))
    sys.exit(not all(claim["holds"] for claim in claims))


def measure(policy: str, waiting: int, steps: int) -> Cost:
    """The cost of steps of an engine planned by `policy`."""
    engine = _LoadedEngine(policy, waiting)
    gc.disable()
    times_ms = sorted([engine.timed_step() for _ in range(steps + WARM_UP_STEPS)][WARM_UP_STEPS:])
    gc.enable()
    p95_ms = times_ms[int(0.95 * len(times_ms))]
    return Cost(policy, waiting, engine.running, round(statistics.median(times_ms), 4), round(p95_ms, 4))


class _LoadedEngine:
    """An engine whose waiting calls are made up again after each step."""

    def __init__(self, policy: str, waiting: int) -> None:
        setup = Setup(
            pages=KV_TOKENS // PAGE_TOKENS, chunk_tokens=CHUNK_TOKENS, max_running=RUNNING + 8, overlaps=False
        )
        self._rank = Rank(setup, time.monotonic, Settings(scheduler=policy))
        self._driver, self._rank_pass = self._rank.plait, self._rank.plait.step
        self._waiting, self._promised = waiting, policy == "slo"
        self._dice = random.Random(1)
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(32)]
        self._arrived = 0
        self._added_s = 0.0
        for _ in range(RUNNING):
            self._add(self._tokens(100), 4000)
        while self._rank.waiting_queue or self._rank.chunked_req or self.running < RUNNING:
            self._step()
        self._refill()
        # SGLang keeps this count. The stand-in would sum it up.
        self._rank.token_to_kv_pool_allocator.available_size = lambda: KV_TOKENS // 2
        for name in ("tick", "ticked", "begins", "ended"):
            setattr(self._driver, name, self._timed(getattr(self._driver, name)))
        setattr(self._driver, "step", self._timed_pass)  # noqa: B010 - a method is replaced

    @property
    def running(self) -> int:
        return len(self._rank.running_batch.reqs)

    def timed_step(self) -> float:
        """Milliseconds of CPU time in the driver, in one step."""
        self._added_s = 0.0
        self._step()
        added_s = self._added_s
        self._refill()
        return added_s * 1e3

    def _step(self) -> None:
        self._rank.begin_step(self._rank._poll_timeout_aborts())  # noqa: SLF001
        self._rank.end_step()
        self._rank.handed.clear()

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.process_time()
            result = hook(*arguments)
            self._added_s += time.process_time() - began_s
            return result

        return timed

    def _timed_pass(self, running_batch: Any, schedule: Callable[[Any], Any]) -> Any:
        def stock(batch: Any) -> Any:
            began_s = time.process_time()
            result = schedule(batch)
            self._added_s -= time.process_time() - began_s
            return result

        return self._timed(self._rank_pass)(running_batch, stock)

    def _refill(self) -> None:
        while len(self._rank.waiting_queue) < self._waiting:
            prefix = self._dice.choice(self._prefixes) if self._dice.random() < 0.8 else []
            self._add([*prefix, *self._tokens(PROMPT_TOKENS - len(prefix))], 1)

    def _add(self, prompt: list[int], output_tokens: int) -> None:
        objectives = {"plait_ttft_ms": self._dice.uniform(*TTFTS_S) * 1e3, "plait_tpot_ms": TPOT_MS}
        parameters = SimpleNamespace(custom_params=objectives if self._promised else None)
        self._arrived += 1
        self._rank.process_input_requests([Request(str(self._arrived), prompt, output_tokens, parameters)])

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
