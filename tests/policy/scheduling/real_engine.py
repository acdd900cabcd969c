"""Random calls through the real embedded engine, under a scheduler to be tested."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hypothesis import strategies as st

from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.policy.costs.cost_model import CostModel
from plait.policy.prefix.block_hash import root_hash
from plait.policy.scheduling.lines import LinesLast
from plait.policy.scheduling.plan import EngineFacts, IterationWork, LocalCall, Plan
from plait.policy.scheduling.slo_scheduler import SloScheduler
from plait.policy.types import Slo
from tests.policy.scheduling.fake_engine import COSTS, slos

CallSpec = tuple[int, int, int, Slo | None, int]
"""Prompt tokens, output tokens, steps after the call before it, objectives, and whose prefix it shares."""

call_specs = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 25), st.integers(0, 4), slos, st.integers(0, 2)), max_size=14
)


class Watched:
    """A scheduler that counts its plans."""

    def __init__(self, scheduler: SloScheduler | LinesLast) -> None:
        self.plans = 0
        self._scheduler = scheduler

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        self.plans += 1
        return self._scheduler.plan(now_s, waiting, running, facts)

    def expect(self, costs: CostModel) -> None:
        self._scheduler.expect(costs)

    def observe(self, duration_s: float, work: IterationWork) -> None:
        self._scheduler.observe(duration_s, work)


def check_every_call_finishes(
    scheduler: SloScheduler | LinesLast, specs: Sequence[CallSpec], lines: Collection[int] = ()
) -> None:
    """Run the calls on a small engine; assert that all of them end, and that nothing stays in use.

    `lines` has the places of those that are lines of batches.
    """
    root, watched = root_hash("m"), Watched(scheduler)
    engine = Engine(
        EngineSettings(name="e", model="m", kv_tokens=320, max_batch_tokens=64, max_running_calls=4),
        COSTS,
        scheduler=watched,
    )
    now_s, ends_s, steps = 0.0, engine.step(0.0).ends_s, 0
    finished: list[LocalCall] = []
    todo = list(enumerate(specs))
    while todo or engine.waiting or engine.running:
        if todo and steps >= todo[0][1][2]:
            number, (size, output, _, slo, family) = todo.pop(0)
            steps = 0
            tokens = [family] * (size // 2) + [100 + number] * (size - size // 2)
            chain, tree_chain = HashChain(16, root, tokens), HashChain(64, root, tokens)
            engine.add(
                EmbeddedCall(
                    str(number),
                    now_s,
                    size,
                    slo=slo,
                    chain=chain,
                    tree_chain=tree_chain,
                    final_output_tokens=output,
                    is_line=number in lines,
                )
            )
            if not engine.idle:
                continue
        now_s = now_s if ends_s is None else ends_s
        step = engine.step(now_s)
        ends_s = step.ends_s
        finished += [output.call for output in step.outputs if output.finished]
        steps += 1
        assert ends_s is not None or not (engine.waiting or engine.running), "it stands still"
        assert watched.plans < 5000, "it goes in circles"
    assert len(finished) == len(specs)
    assert engine.facts.free_blocks == 20
