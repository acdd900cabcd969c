"""What latency and throughput calls cost each other on one engine, in seconds of engine time (Parrot, section 5.4).

While an engine serves a latency call, its iterations may take no longer than that call's time per token, and throughput
work gets the share r of the engine that `capacity_ratio` says. Work of W seconds then takes W / r for as long as that
lasts. So the delay of W seconds of throughput work beside D seconds of latency work is

    min(W (1 / r - 1), (1 - r) D)

whichever of the two ends first. A call that is not optimised for anything harms nobody and is not harmed.
"""

from __future__ import annotations

from typing import Final

from plait.policy.placement.capacity import capacity_ratio
from plait.policy.placement.engine_view import EngineView
from plait.policy.types import Call, Objective

DEFAULT_TPOT_S: Final = 0.040
"""The time per token of latency calls of which it is not known: that of deduced ones (`objectives_slo.LATENCY_SLO`)."""


def harm_s(call: Call, engine: EngineView, missed_tokens: int, prefill_s: float) -> float:
    """The harm of placing `call` on `engine`, where `missed_tokens` of it have to be computed in `prefill_s`.

    A latency call delays the throughput work that is there; it costs nothing where another latency call has done so
    already. A throughput call is itself delayed by the latency work that is there, which in turn waits for its prefill.
    """
    if call.served_as is None:
        return 0.0
    latency, throughput = (engine.work.backlogs[objective] for objective in (Objective.LATENCY, Objective.THROUGHPUT))
    if call.served_as is Objective.LATENCY:
        if latency.calls or not throughput.calls:
            return 0.0
        tpot_s = call.slo.tpot_s if call.slo is not None else None
        work = engine.expected_work(call, missed_tokens, prefill_s)
        return delay_s(engine, throughput.total_s, work.total_s, tpot_s or DEFAULT_TPOT_S)
    if not latency.calls:
        return 0.0
    work = engine.expected_work(call, missed_tokens, prefill_s)
    stall_s = min(prefill_s, latency.total_s)  # it waits no longer than it lasts
    return delay_s(engine, work.total_s, latency.total_s, DEFAULT_TPOT_S) + stall_s


def delay_s(engine: EngineView, throughput_s: float, latency_s: float, tpot_s: float) -> float:
    """What `throughput_s` of work lose while `latency_s` of latency work are served in iterations of `tpot_s`."""
    ratio = capacity_ratio(engine.cost_model, tpot_s, engine.kv_tokens)
    return min(throughput_s * (1 / ratio - 1), (1 - ratio) * latency_s)
