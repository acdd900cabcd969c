"""What the plugin adds to the CPU time of SGLang's scheduling steps: `python -m benchmarks sglang_scheduler_cost`.

Every step is one of an engine under load: 64 calls decode, the rest of the budget prefills, and the waiting calls
(2,000 prompt tokens each, the first half of most of them cached) are looked through for admission. For `slo` every call
has a TTFT and a TPOT. The same steps are run in several rounds. The least time of a step counts, because other work on
the machine only adds to it.

The scheduler is the tests' stand-in, whose prefill pass is not SGLang's. So the hooks are timed, less the pass itself.
The cache's events, and our limits inside SGLang's adder, are not included.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from plait.backends.adapter.scheduler_settings import SglangSettings
from plait.lab.simulation.claim import Claim
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain
from tests.backends.sglang.fake_scheduler import PAGE_TOKENS, Rank, Request, Setup

RUNNING = 64
PROMPT_TOKENS = 2000
SHARED_TOKENS = 1024
PREFIXES = 32
BATCH_TOKENS = 2048
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


def main() -> int:
    """Measure, print a table and write the report."""
    parser = timed_parser(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=200, help="steps measured for each row (default: %(default)s)")
    arguments = parser.parse_args()
    report = measure_rows(lambda policy, waiting: measure(policy, waiting, arguments.steps), arguments.rounds)
    return finish("sglang_scheduler_cost", report, arguments)


def measure(policy: str, waiting: int, steps: int) -> Round:
    """One round of an engine planned by `policy`."""
    engine = _Engine(policy, waiting)
    times = measured(lambda _: engine.timed_step(), steps)
    return Round(engine.running, times)


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


class _Engine:
    """The stand-in, whose cache has the shared prefixes.

    Its waiting calls are made up again after each step. Its calls are the same for the same `policy`.
    """

    def __init__(self, policy: str, waiting: int) -> None:
        self._policy, self._waiting = policy, waiting
        self._dice = random.Random(1)
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(PREFIXES)]
        pages, overlaps = KV_TOKENS // PAGE_TOKENS, False
        setup = Setup(pages=pages, chunk_tokens=BATCH_TOKENS, max_running=RUNNING + 8, overlaps=overlaps)
        self._rank = Rank(setup, time.monotonic, SglangSettings(scheduler=policy))
        self._driver, self._plan_pass = self._rank.plait, self._rank.plait.step
        self._arrived = 0
        self._stock_s = self._added_s = 0.0
        self._store_prefixes()
        self._send_running()
        while self.waiting or self._rank.chunked_req or self.running < RUNNING:
            self._step()
        self._refill()
        # SGLang keeps this count. The stand-in would sum it up.
        self._rank.token_to_kv_pool_allocator.available_size = lambda: KV_TOKENS // 2
        for name in ("tick", "ticked", "begins", "ended"):
            setattr(self._driver, name, self._timed(getattr(self._driver, name)))
        setattr(self._driver, "step", self._timed_pass)  # noqa: B010 - a method is replaced

    @property
    def running(self) -> int:
        """How many calls run."""
        return len(self._rank.running_batch.reqs)

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._rank.waiting_queue)

    def timed_step(self) -> StepTimes:
        """The CPU time of the stand-in's pass, without and with the driver's."""
        self._stock_s = self._added_s = 0.0
        self._step()
        times = StepTimes(self._stock_s * 1e3, (self._stock_s + self._added_s) * 1e3)
        self._refill()
        return times

    def _store_prefixes(self) -> None:
        observer = self._driver.observer
        for prefix in self._prefixes:
            blocks = chain(prefix, TREE_BLOCK_TOKENS, observer.root(None))
            for parent, block in zip((None, *blocks), blocks, strict=False):
                observer.journal.store(block, parent)

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

    def _timed_pass(self, running_batch: Any, schedule: Callable[[], Any]) -> Any:
        def stock() -> Any:
            began_s = time.process_time()
            result = schedule()
            self._stock_s += time.process_time() - began_s
            return result

        result = self._timed(self._plan_pass)(running_batch, stock)
        self._added_s -= self._stock_s
        return result

    def _add(self, prompt: list[int], output_tokens: int, annotations: dict[str, float], cached_tokens: int) -> None:
        parameters = SimpleNamespace(custom_params=annotations or None)
        self._arrived += 1
        request = Request(str(self._arrived), prompt, output_tokens, parameters, prefix_len=cached_tokens)
        self._rank.process_input_requests([request])

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


if __name__ == "__main__":
    sys.exit(main())
