"""Keeping the calls of one application together, in seconds (Parrot, section 5.4).

A shared prefix is counted already: its prefill is shorter on the engine that has it cached. Beyond that, calls of one
application should not drift apart without a reason. That may decide a tie, not more.
"""

from __future__ import annotations

from plait.policy.placement.engine_view import EngineView
from plait.policy.types import Call

ONE_TOKEN = ((1, 0),)


def apart_s(call: Call, engine: EngineView) -> float:
    """The engine's shortest iteration if no other call of the application is outstanding on it, else 0.

    Costs that differ by less than an iteration cannot be told apart. So this decides between engines of equal cost and
    never against load.
    """
    if call.application is None or call.application in engine.work.applications:
        return 0.0
    return engine.cost_model.iteration_time_s(ONE_TOKEN)
