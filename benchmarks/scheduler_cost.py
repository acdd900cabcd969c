"""What `vllm_scheduler_cost` and `sglang_scheduler_cost` share: the load, the figures and the claims.

Every step is one of an engine under load: 64 calls decode, the rest of the budget prefills, and the waiting calls
(2,000 prompt tokens each, the first half of most of them cached) are looked through for admission. For `slo` every call
has a TTFT and a TPOT.

The same steps are run in several rounds. The least time of a step counts, because other work on the machine only adds
to it.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report
from plait.lab.simulation.claim import Claim

RUNNING = 64
PROMPT_TOKENS = 2000
SHARED_TOKENS = 1024
PREFIXES = 32
BATCH_TOKENS = 2048
BLOCK_TOKENS = 16
KV_TOKENS = 960_000
WARM_UP_STEPS = 20
TARGETS_MS = {256: 0.5, 2000: 10.0}
"""The most that may be added to a step, in milliseconds, by number of waiting calls."""
POLICIES = ("fcfs", "hit_ratio", "longest_prefix", "slo")
TTFTS_S = (1.0, 60.0)
TPOT_MS = 187.5
"""Objectives as those of `plan_cost`."""


class StepTimes(NamedTuple):
    """Milliseconds of process CPU time: without Plait, and with it."""

    stock_ms: float
    planned_ms: float


class Round(NamedTuple):
    """An engine's measured steps, and how many calls ran in them."""

    running: int
    steps: list[StepTimes]


@dataclass(frozen=True)
class Cost:
    """Medians over the measured steps, in milliseconds of process CPU time. `stock_ms` is the step without Plait."""

    policy: str
    waiting: int
    running: int
    stock_ms: float
    added_ms: float
    added_p95_ms: float

    @classmethod
    def of(cls, policy: str, waiting: int, rounds: Sequence[Round]) -> Cost:
        """The figures of rounds of the same steps."""
        steps = list(zip(*(one.steps for one in rounds), strict=True))
        stock_ms = [min(times.stock_ms for times in step) for step in steps]
        planned_ms = [min(times.planned_ms for times in step) for step in steps]
        added_ms = sorted(planned - stock for stock, planned in zip(stock_ms, planned_ms, strict=True))
        p95_ms = added_ms[int(0.95 * len(added_ms))]
        figures = [round(ms, 4) for ms in (statistics.median(stock_ms), statistics.median(added_ms), p95_ms)]
        return cls(policy, waiting, rounds[0].running, figures[0], figures[1], figures[2])


class LoadedEngine(ABC):
    """An engine whose waiting calls are made up again after each step. Its calls are the same for the same `policy`."""

    def __init__(self, policy: str, waiting: int) -> None:
        self._policy, self._waiting = policy, waiting
        self._dice = random.Random(1)
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(PREFIXES)]

    @property
    @abstractmethod
    def running(self) -> int:
        """How many calls run."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """How many calls wait."""

    @abstractmethod
    def _add(self, prompt: list[int], output_tokens: int, annotations: dict[str, float], cached_tokens: int) -> None:
        """Send a call. The first `cached_tokens` of its prompt are in the cache."""

    def _send(self, prompt: list[int], output_tokens: int, cached_tokens: int = 0) -> None:
        objectives = {"plait_ttft_ms": self._dice.uniform(*TTFTS_S) * 1e3, "plait_tpot_ms": TPOT_MS}
        self._add(prompt, output_tokens, objectives if self._policy == "slo" else {}, cached_tokens)

    def _send_running(self) -> None:
        for _ in range(RUNNING):
            self._send(self._tokens(100), 4000)

    def _refill(self) -> None:
        while self.waiting < self._waiting:
            prefix = self._dice.choice(self._prefixes) if self._dice.random() < 0.8 else []
            self._send([*prefix, *self._tokens(PROMPT_TOKENS - len(prefix))], 1, len(prefix))

    def _tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(1000) for _ in range(count)]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of both."""
    made = timed_parser(doc, rounds=5)
    made.add_argument("--steps", type=int, default=200, help="steps measured for each row (default: %(default)s)")
    return made


def measured(step: Callable[[int], StepTimes], steps: int) -> list[StepTimes]:
    """The times of each step. `step` takes the step's number. The first steps are not measured."""
    gc.disable()
    times = [step(number) for number in range(steps + WARM_UP_STEPS)][WARM_UP_STEPS:]
    gc.enable()
    return times


def measure_rows(measure: Callable[[str, int], Round], rounds: int) -> Report:
    """Measure the rows in turns. `measure` runs one round of a local scheduler with that many waiting calls."""
    rows = [(policy, waiting) for policy in POLICIES for waiting in TARGETS_MS]
    found: dict[tuple[str, int], list[Round]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row in rows:
            found[row].append(measure(*row))
    costs = [Cost.of(*row, found[row]) for row in rows]
    lines = [f"{'policy':<16}{'waiting':>8}{'running':>8}{'stock':>10}{'added':>10}{'p95':>10}   ms a step"]
    lines += [
        f"{cost.policy:<16}{cost.waiting:>8}{cost.running:>8}{cost.stock_ms:>10.3f}{cost.added_ms:>10.3f}"
        f"{cost.added_p95_ms:>10.3f}"
        for cost in costs
    ]
    claims = [_claim(cost) for cost in costs]
    return Report(lines=lines, claims=claims, results=[asdict(cost) for cost in costs], is_timed=True)


def _claim(cost: Cost) -> Claim:
    calls = f"{cost.waiting} waiting and {cost.running} running calls"
    return Claim(
        f"{cost.policy}: CPU time (ms) added to a step with {calls}", cost.added_ms, most=TARGETS_MS[cost.waiting]
    )
