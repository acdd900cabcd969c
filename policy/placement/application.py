"""The cost of separating the calls of one application, in seconds (Parrot, section 5.4).

The prefill cost already counts a shared prefix: the prefill is shorter on the engine that has the prefix cached. The
cost here only decides between engines of equal cost.
"""

from __future__ import annotations

from plait.policy.placement.engine_view import EngineView
from plait.policy.types import Call

ONE_TOKEN = ((1, 0),)


def apart_s(call: Call, engine: EngineView) -> float:
    """The engine's shortest iteration if no other call of the application is outstanding on it, else 0.

    Costs that differ by less than an iteration count as equal. So this decides ties and never outweighs load.
    """
    if call.application is None or call.application in engine.work.applications:
        return 0.0
    return engine.cost_model.iteration_time_s(ONE_TOKEN)
