"""Harm: how long latency and throughput calls delay each other on one engine, in seconds of engine time (Parrot, 5.4).

While an engine serves a latency call, each iteration may take at most that call's TPOT. Throughput work then gets the
share r of the engine (`capacity_ratio`), so W seconds of work take W / r. D seconds of latency work delay W seconds of
throughput work by

    min(W (1 / r - 1), (1 - r) D)

The first term holds if the throughput work ends first, the second if the latency work does. A call without an objective
does no harm and is not harmed.
"""

from __future__ import annotations

from typing import Final

from plait.policy.placement.capacity import capacity_ratio
from plait.policy.placement.engine_view import EngineView
from plait.policy.types import Call, Objective

DEFAULT_TPOT_S: Final = 0.040
"""The assumed TPOT of a latency call that states none: the TPOT in `objectives_slo.LATENCY_SLO`."""


def harm_s(call: Call, engine: EngineView, missed_tokens: int, prefill_s: float) -> float:
    """The harm of placing `call` on `engine`, where the prefill of its `missed_tokens` takes `prefill_s`.

    A latency call delays the throughput work on the engine. It adds no harm if another latency call is there already.
    The latency work on the engine delays a throughput call. The prefill of the throughput call delays that latency
    work.
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
    """How long `latency_s` of latency work, in iterations of `tpot_s`, delay `throughput_s` of throughput work."""
    ratio = capacity_ratio(engine.cost_model, tpot_s, engine.kv_tokens)
    return min(throughput_s * (1 / ratio - 1), (1 - ratio) * latency_s)
