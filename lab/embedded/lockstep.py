"""Ranks of one server that step together, as data-parallel ranks do whose experts are spread over all of them.

A rank without work makes dummy steps meanwhile (vLLM's `execute_dummy_batch`, SGLang's idle batch).
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.lab.embedded.engine import Engine, Step


class Lockstep:
    """Steps `engines` as one: iterations begin together, and each lasts as long as the longest of them.

    A call that reaches a rank meanwhile waits for the next iteration, also at a rank without work.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self._ends_s = 0.0

    @property
    def idle(self) -> bool:
        return all(engine.idle for engine in self.engines)

    def step(self, now_s: float) -> Step:
        """As `Engine.step`, of all ranks."""
        if now_s < self._ends_s and not self.idle:
            return Step((), self._ends_s)
        steps = [engine.step(now_s) for engine in self.engines]
        outputs = tuple(output for step in steps for output in step.outputs)
        ends = [(step.ends_s, one) for one, step in zip(self.engines, steps, strict=True) if step.ends_s is not None]
        if self.idle:
            return Step(outputs, min((ends_s for ends_s, _ in ends), default=None))  # the next load has ended
        self._ends_s = max(ends_s for ends_s, engine in ends if not engine.idle)
        for engine in self.engines:
            engine.extend(self._ends_s)
        return Step(outputs, self._ends_s)
