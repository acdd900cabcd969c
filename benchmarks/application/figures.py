"""What the runs of one case under one system come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.application.breakdown import mean_breakdown
from benchmarks.application.clients import Job


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all jobs of one kind; times in seconds, `breakdown` as in `Breakdown`.

    `normalised_s` is latency an output token, `token_s` the time from one output token of a call to the next.
    `sustained_per_s`: the highest rate that was sustained, at which the rest was measured; None: not looked for.
    """

    jobs: int
    latency_s: float
    latency_p90_s: float
    normalised_s: float
    token_s: float
    hit_rate: float
    breakdown: dict[str, float]
    latencies_s: tuple[float, ...]
    sustained_per_s: float | None = None


def figures(jobs: Sequence[Job], sustained_per_s: float | None = None) -> Figures:
    """Of jobs that have ended."""
    latencies_s = tuple(job.latency_s for job in jobs)
    records = [record for job in jobs for record in job.records.values()]
    later_tokens = sum(record.output_tokens - 1 for record in records)
    return Figures(
        jobs=len(jobs),
        latency_s=fmean(latencies_s),
        latency_p90_s=sorted(latencies_s)[math.ceil(0.9 * len(latencies_s)) - 1],
        normalised_s=fmean(job.normalised_s for job in jobs),
        token_s=sum(record.finished_s - record.first_token_s for record in records) / max(1, later_tokens),
        hit_rate=sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records),
        breakdown=mean_breakdown(jobs),
        latencies_s=latencies_s,
        sustained_per_s=sustained_per_s,
    )
