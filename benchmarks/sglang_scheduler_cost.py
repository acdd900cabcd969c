"""What the plugin adds to the CPU time of SGLang's scheduling steps: `python -m benchmarks.sglang_scheduler_cost`.

The scheduler is the tests' stand-in, whose prefill pass is not SGLang's. So the hooks are timed, less the pass itself,
under the load of `scheduler_cost`. The cache's events, and our limits inside SGLang's adder, are not included.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks.running.report import finish
from benchmarks.scheduler_cost import (
    BATCH_TOKENS,
    BLOCK_TOKENS,
    KV_TOKENS,
    RUNNING,
    LoadedEngine,
    Round,
    StepTimes,
    measure_rows,
    measured,
    parser,
)
from plait.backends.adapter.scheduler_settings import SglangSettings
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain
from tests.backends.sglang.fake_scheduler import PAGE_TOKENS, Rank, Request, Setup

assert PAGE_TOKENS == BLOCK_TOKENS


def main() -> int:
    """Measure, print a table and write the report."""
    arguments = parser(__doc__).parse_args()
    report = measure_rows(lambda policy, waiting: measure(policy, waiting, arguments.steps), arguments.rounds)
    return finish("sglang_scheduler_cost", report, arguments)


def measure(policy: str, waiting: int, steps: int) -> Round:
    """One round of an engine planned by `policy`."""
    engine = _Engine(policy, waiting)
    times = measured(lambda _: engine.timed_step(), steps)
    return Round(engine.running, times)


class _Engine(LoadedEngine):
    """The stand-in, whose cache has the shared prefixes."""

    def __init__(self, policy: str, waiting: int) -> None:
        super().__init__(policy, waiting)
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
        return len(self._rank.running_batch.reqs)

    @property
    def waiting(self) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
