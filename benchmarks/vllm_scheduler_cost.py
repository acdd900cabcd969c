"""What the plugin adds to the CPU time of vLLM's `schedule()`: `python -m benchmarks.vllm_scheduler_cost`.

Run by the Python of an environment with vLLM; no model is loaded. Stock and planned schedulers, with the same calls in
the same state, take turns step by step, under the load of `scheduler_cost`. The stock scheduler is sent objectives too,
and ignores them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

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


def main() -> int:
    """Measure, print a table and write the report."""
    options = parser(__doc__)
    options.add_argument("--asynchronous", action="store_true", help="on vLLM's AsyncScheduler")
    arguments = options.parse_args()
    report = measure_rows(
        lambda policy, waiting: measure(policy, waiting, arguments.steps, asynchronous=arguments.asynchronous),
        arguments.rounds,
    )
    return finish("vllm_scheduler_cost", report, arguments)


def measure(policy: str, waiting: int, steps: int, *, asynchronous: bool) -> Round:
    """One round of two engines in the same state, stepped in turns; one of them planned by `policy`."""
    stock, planned = (_Engine(policy, waiting, plans=plans, asynchronous=asynchronous) for plans in (False, True))

    def step(number: int) -> StepTimes:
        first, second = (stock, planned) if number % 2 else (planned, stock)
        times_ms = {first: first.timed_step(), second: second.timed_step()}
        return StepTimes(times_ms[stock], times_ms[planned])

    times = measured(step, steps)
    return Round(planned.running, times)


class _Engine(LoadedEngine):
    """vLLM's scheduler, planned by the policy if it `plans`."""

    def __init__(self, policy: str, waiting: int, *, plans: bool, asynchronous: bool) -> None:
        from e2e.real_schedulers.on_vllm.engine import Engine, Setup  # noqa: PLC0415 - only where vLLM is

        super().__init__(policy, waiting)
        setup = Setup(
            folder=Path(tempfile.mkdtemp()),
            asynchronous=asynchronous,
            blocks=KV_TOKENS // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            max_batch_tokens=BATCH_TOKENS,
            max_running=RUNNING + 8,
            plait={"scheduler": policy} if plans else None,
        )
        self._engine = Engine(setup)
        for prefix in self._prefixes:
            self._send([*prefix, 1], 1)
        self._engine.run()
        self._send_running()
        while self.waiting or any(call.is_prefill_chunk for call in self._engine.scheduler.running):
            self._engine.step()
        self._refill()

    @property
    def running(self) -> int:
        return len(self._engine.scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._engine.scheduler.waiting)

    def timed_step(self) -> float:
        """Milliseconds of CPU time in `schedule()`."""
        began_s = time.process_time()
        output = self._engine.scheduler.schedule()
        elapsed_s = time.process_time() - began_s
        self._engine.finish_step(output)
        self._refill()
        return elapsed_s * 1e3

    def _add(self, prompt: list[int], output_tokens: int, annotations: dict[str, float], cached_tokens: int) -> None:
        del cached_tokens  # the calls with the prefixes alone have computed them
        self._engine.add(prompt, output_tokens, name=None, salt=None, arrival_time=None, **annotations)


if __name__ == "__main__":
    sys.exit(main())
