"""What is compared with: a stock engine, and one with Plait whose levers are all pulled by force."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from e2e.own_schedulers.forced_levers import AHEAD
from e2e.real_engines.engine import MODEL, RealEngine
from e2e.real_engines.greedy import Outputs, greedy_outputs
from e2e.server_process import eventually
from plait.backends.protocol.cache_state import IterationState

FORCED_LEVERS: Final[Mapping[str, int | str]] = {
    "scheduler": "hit_ratio",
    "order": "reverse",
    "budget_tokens": 128,
    "chunk_tokens": 64,
    "preempt_every_iterations": 7,
}
"""Holding back is not among them: it ends when nothing runs, and with preemption that is soon."""
FORCED_SCHEDULER: Final = "forced_levers:over"


@dataclass(frozen=True)
class Reference:
    """Greedy outputs of both engines, and what was seen of the levers of the second.

    `preemptions` are those during its outputs, `iterations` the last ones of them; `completed` is the order in which
    calls ended that were sent in alphabetical order, the last three of them while the first was being prefilled.
    `scheduler` is the local scheduler that it reported. `ahead`: whether a plan was made while an iteration ran.
    """

    stock: Outputs
    forced: Outputs
    preemptions: int
    iterations: IterationState
    completed: str
    scheduler: str
    ahead: bool


def collect_reference(stock: RealEngine, forced: RealEngine, long_tokens: int) -> Reference:
    """Ask both engines at the same time. They run already. A prompt of `long_tokens` takes them long."""
    preemptions = forced.cache_state().scheduler.preemptions
    with ThreadPoolExecutor() as pool:
        of_stock, of_forced = (pool.submit(greedy_outputs, engine) for engine in (stock, forced))
    return Reference(
        stock=of_stock.result(),
        forced=of_forced.result(),
        preemptions=forced.cache_state().scheduler.preemptions - preemptions,
        iterations=forced.cache_state().iteration,
        completed=_completion_order(forced, long_tokens),
        scheduler=forced.cache_state().scheduler.policy,
        ahead=AHEAD in forced.log(),
    )


def _completion_order(engine: RealEngine, long_tokens: int) -> str:
    completed: list[str] = []

    def run(name: str, prompt_tokens: int) -> None:
        prompt = [ord(name), *range(10, 9 + prompt_tokens)]
        response = engine.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
        assert response.status_code == 200, response.text
        completed.append(name)

    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(run, "A", long_tokens)]
        for already, name in enumerate("BCD", start=1):
            eventually(lambda n=already: engine.outstanding_calls() == n)  # type: ignore[misc]
            ended.append(pool.submit(run, name, long_tokens // 5))
    for future in ended:
        future.result()
    return "".join(completed)
