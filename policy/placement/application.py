"""Keeping the calls of one application together, in seconds (Parrot, section 5.4).

What they share in their prompts is counted where it is cached: on the engine that has it, the prefill is shorter. What
is left is that calls which end in one result should not drift apart without a reason. That is worth a tie, not more.
"""

from __future__ import annotations

from plait.policy.placement.engine_view import EngineView
from plait.policy.types import Call

ONE_TOKEN = ((1, 0),)


def apart_s(call: Call, engine: EngineView) -> float:
    """The engine's shortest iteration if no other call of the application is outstanding on it, else 0.

    Costs that differ by less than an iteration are the same for all that can be known, so this decides between engines
    that cost the same and never against load.
    """
    if call.application is None or call.application in engine.work.applications:
        return 0.0
    return engine.cost_model.iteration_time_s(ONE_TOKEN)
