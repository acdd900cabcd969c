"""Decode balance: a call with a prompt to compute goes where mostly decoding is done (Preble, section 3.2).

Decoding leaves compute unused, which a prefill can have almost for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.shift import TH_BAL

IMBAL_RATIO = 0.7
"""Preble's ImbalR: an engine whose load has a larger share of decoding has compute to spare. The paper derives it from
the accelerator and the model without a number. 0.7 is ours.
"""

STANDS_OUT = 1.25
"""Ours: the share of decoding has to be so many times the median. Where all engines mostly decode, none has more to
spare than the others.
"""

DecodeBalance = Callable[[Sequence[EngineView]], EngineView | None]
"""Chooses the engine with compute to spare; None if there is none."""


def spare_compute(engines: Sequence[EngineView]) -> EngineView | None:
    """The engine with the highest share of decoding, if it exceeds `IMBAL_RATIO` and stands out.

    None if that engine is overloaded: it has more than `TH_BAL` times the load of the lightest.
    """
    ratios = [engine.ledger.decode_ratio() for engine in engines]
    highest = max(ratios)
    if highest <= IMBAL_RATIO or highest < STANDS_OUT * median(ratios):
        return None
    engine = engines[ratios.index(highest)]
    lightest_s = min(other.ledger.window_cost_s() for other in engines)
    return engine if engine.ledger.window_cost_s() <= TH_BAL * lightest_s else None
