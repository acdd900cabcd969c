"""Harm: how long latency and throughput calls delay each other on one engine, in seconds of engine time (Parrot, 5.4).

While an engine serves a latency call, its iterations may take no longer than that call's time per token. Throughput
work then gets the share r of the engine (`capacity_ratio`), so work of W seconds takes W / r. The delay of W seconds of
throughput work beside D seconds of latency work is

    min(W (1 / r - 1), (1 - r) D)

depending on which of the two ends first. A call without an objective does no harm and is not harmed.
"""

from __future__ import annotations

from typing import Final

from plait.policy.placement.capacity import capacity_ratio
from plait.policy.placement.engine_view import EngineView
from plait.policy.types import Call, Objective

DEFAULT_TPOT_S: Final = 0.040
"""The assumed TPOT of a latency call without one: that of deduced latency calls (`objectives_slo.LATENCY_SLO`)."""


def harm_s(call: Call, engine: EngineView, missed_tokens: int, prefill_s: float) -> float:
    """The harm of placing `call` on `engine`, where its `missed_tokens` are computed in `prefill_s`.

    A latency call delays the throughput work on the engine. It adds no harm if another latency call is there already.
    A throughput call is delayed by the latency work on the engine, and its prefill delays that latency work.
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
    stall_s = min(prefill_s, latency.total_s)  # the latency work cannot wait longer than it lasts
    return delay_s(engine, work.total_s, latency.total_s, DEFAULT_TPOT_S) + stall_s


def delay_s(engine: EngineView, throughput_s: float, latency_s: float, tpot_s: float) -> float:
    """The delay of `throughput_s` of work while `latency_s` of latency work run in iterations of `tpot_s`."""
    ratio = capacity_ratio(engine.cost_model, tpot_s, engine.kv_tokens)
    return min(throughput_s * (1 / ratio - 1), (1 - ratio) * latency_s)
