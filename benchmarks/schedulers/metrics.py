"""What a run comes to, and the goodput that no schedule can exceed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.mixed_prompts import MixedCall
from benchmarks.schedulers.engine_run import Run
from plait.policy.costs.cost_model import CostModel

WARM_UP_SHARE = 0.1
"""Of the time in which calls arrive: not counted, since the engine starts empty."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """One run's figures. Rates are over the window from the warm-up to the last arrival, without the draining.

    Attainments and times are over the calls that arrive in the window, whenever they end. `feasible_attainment` is over
    those that an idle engine could serve in time.
    """

    calls: int
    window_s: float
    throughput_calls_s: float
    throughput_tokens_s: float
    goodput_calls_s: float
    call_attainment: float
    feasible_attainment: float
    iteration_attainment: float
    feasible_iteration_attainment: float
    jct_mean_s: float
    ttft_mean_s: float
    jct_attainment: float
    compute_utilisation: float
    busy_forward_tokens: float
    kv_utilisation: float
    preemptions: int
    makespan_s: float
    decision_median_ms: float
    decision_mean_ms: float
    decision_max_ms: float


def window_s(calls: Sequence[MixedCall]) -> tuple[float, float]:
    """Start and end of what is counted."""
    ends_s = calls[-1].arrives_s
    return WARM_UP_SHARE * ends_s, ends_s


def measure(run: Run) -> Metrics:
    """The figures of a finished run."""
    starts_s, ends_s = window_s([record.call for record in run.records])
    duration_s = ends_s - starts_s
    records = [record for record in run.records if record.call.arrives_s >= starts_s]
    feasible = [record for record in records if record.call.feasible]
    sums = run.iterations
    decisions_ms = [nanoseconds / 1e6 for nanoseconds in sums.decisions_ns]
    return Metrics(
        calls=len(records),
        window_s=duration_s,
        throughput_calls_s=sum(starts_s <= record.finished_s <= ends_s for record in run.records) / duration_s,
        throughput_tokens_s=sum(starts_s <= at_s <= ends_s for at_s in run.output_times_s) / duration_s,
        goodput_calls_s=sum(record.met for record in records) / duration_s,
        call_attainment=_mean(record.met for record in records),
        feasible_attainment=_mean(record.met for record in feasible),
        iteration_attainment=sum(record.iterations_met for record in records)
        / sum(record.call.lengths.output_tokens for record in records),
        feasible_iteration_attainment=sum(record.iterations_met for record in feasible)
        / max(1, sum(record.call.lengths.output_tokens for record in feasible)),
        jct_mean_s=fmean(record.jct_s for record in records),
        ttft_mean_s=fmean(record.ttft_s for record in records),
        jct_attainment=_mean(record.jct_met for record in records),
        compute_utilisation=sums.full_forwards / sums.count,
        busy_forward_tokens=sums.forward_tokens / sums.count,
        kv_utilisation=sums.kv_share_s / sums.busy_s,
        preemptions=sums.preemptions,
        makespan_s=max(record.finished_s for record in run.records),
        decision_median_ms=median(decisions_ms),
        decision_mean_ms=fmean(decisions_ms),
        decision_max_ms=max(decisions_ms),
    )


def goodput_bound(calls: Sequence[MixedCall], cost_model: CostModel, kv_tokens: int) -> float:
    """Calls/s that can meet their objectives in the window at most, however they are scheduled.

    Three relaxations, the least of them: the calls that an idle engine can serve in time; of these as many as their
    prompts' linear forward time allows until the last TTFT is due; as many as the KV cache has token-seconds for until
    then, each call taking the least it can, and those still held after that by their prompts alone.
    """
    starts_s, ends_s = window_s(calls)
    feasible = [call for call in calls if call.feasible and call.arrives_s >= starts_s]
    if not feasible:
        return 0.0
    last_ttft_s = max(call.slo.ttft_s or 0.0 for call in feasible)
    available_s = ends_s - starts_s + last_ttft_s
    token_s = cost_model.prompts.slope_s / cost_model.efficiency
    compute = most_items((call.lengths.prompt_tokens * token_s for call in feasible), available_s)
    kv = most_items((_kv_token_s(call, cost_model) for call in feasible), kv_tokens * available_s)
    held = most_items((call.lengths.prompt_tokens for call in feasible), kv_tokens)
    return min(float(len(feasible)), compute, kv + held) / (ends_s - starts_s)


def most_items(sizes: Iterable[float], capacity: float) -> float:
    """The most items that fit, the last one in part: the smallest first."""
    count = 0.0
    for size in sorted(sizes):
        if size >= capacity:
            return count + (capacity / size if size else 0.0)
        capacity -= size
        count += 1
    return count


def _kv_token_s(call: MixedCall, cost_model: CostModel) -> float:
    """Tokens held times seconds from the first token to the last, alone on the engine."""
    rest = call.lengths.output_tokens - 1
    mean_tokens = call.lengths.prompt_tokens + call.lengths.output_tokens / 2
    return mean_tokens * cost_model.decode_time_s(rest, call.lengths.prompt_tokens)


def _mean(flags: Iterable[bool]) -> float:
    values = [float(flag) for flag in flags]
    return fmean(values) if values else 0.0
