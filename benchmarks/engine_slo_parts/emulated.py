"""The same calls on an emulated engine: its core in virtual time, with the times of the real server's iterations."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.engine_slo_parts.figures import OBJECTIVE
from benchmarks.engine_slo_parts.servers import BATCH_TOKENS, KV_TOKENS, OURS, STOCK
from benchmarks.engine_slo_parts.workload import BenchCall
from benchmarks.mixed_prompts import Lengths, MixedCall
from benchmarks.schedulers.engine_run import run
from plait.lab.profiling.engine_probe import EngineProbe
from plait.lab.profiling.fitted_profile import Circumstances, fit_profile
from plait.lab.profiling.profile_plan import QUICK
from plait.lab.profiling.profiler import Profiler
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.types import NO_SLO, Slo

POLICIES = {STOCK: "fcfs", OURS: "slo"}


async def measured_costs(url: str) -> CostModel:
    """How long the iterations of a server with the adapter take, as `plait profile --quick` finds."""
    async with EngineProbe(url) as probe:
        identity = await probe.identify()
        measured = await Profiler(probe, identity.limits, QUICK, random.Random(0), lambda _: None).measure()
    return fit_profile(measured, identity, Circumstances("", "")).profile.cost_model()


def attainments(runs: Sequence[Sequence[BenchCall]], costs: CostModel, ahead: int) -> dict[str, float]:
    """By system: the share of all runs' short calls that had their first token within `OBJECTIVE` unloaded TTFTs.

    The engine plans as many iterations `ahead` as the real one.
    """
    short_tokens = min(len(call.prompt) for calls in runs for call in calls)
    promised = Slo(ttft_s=OBJECTIVE * costs.iteration_time_s([(short_tokens, 0)]))
    found: dict[str, float] = {}
    for system, policy in POLICIES.items():
        met = [
            record.met
            for calls in runs
            for record in run(
                SCHEDULERS[policy](),
                [_emulated(number, call, promised) for number, call in enumerate(calls)],
                costs,
                kv_tokens=KV_TOKENS,
                max_batch_tokens=BATCH_TOKENS,
                ahead=ahead,
            ).records
            if not record.call.long_source
        ]
        found[system] = sum(met) / len(met)
    return found


def _emulated(number: int, call: BenchCall, promised: Slo) -> MixedCall:
    lengths = Lengths(len(call.prompt), call.output_tokens)
    slo = NO_SLO if call.is_long else promised
    return MixedCall(number, call.at_s, lengths, call.is_long, slo, feasible=True)
