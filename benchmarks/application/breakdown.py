"""Where a job's time goes: along its critical path, from the client's start to the last awaited value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from benchmarks.application.clients import Job
from plait.lab.simulation.simulate import CallRecord


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one job. `network_s` is all that no call of the critical path was in an engine.

    `queue_s`: in an engine, before it began to compute; `prefill_s`: from then to the first token, with what other
    calls' share of the iterations takes; `decode_s`: from the first token to the last.
    """

    network_s: float
    queue_s: float
    prefill_s: float
    decode_s: float


def breakdown(job: Job) -> Breakdown:
    """One job's."""
    path = list(critical_path(job))
    queue_s = sum(record.admitted_s - record.arrived_s for record in path)
    prefill_s = sum(record.first_token_s - record.admitted_s for record in path)
    decode_s = sum(record.finished_s - record.first_token_s for record in path)
    return Breakdown(job.latency_s - queue_s - prefill_s - decode_s, queue_s, prefill_s, decode_s)


def mean_breakdown(jobs: Sequence[Job]) -> dict[str, float]:
    """Means over jobs, by field."""
    fields = [asdict(breakdown(job)) for job in jobs]
    return {name: fmean(one[name] for one in fields) for name in fields[0]}


def critical_path(job: Job) -> Iterator[CallRecord]:
    """The calls that each held up the next, the last first."""
    calls = {call.output: call for call in job.launch.program.calls}
    waited_for: Sequence[str] = job.launch.program.awaited
    while waited_for:
        last = max(waited_for, key=lambda name: job.records[name].finished_s)
        yield job.records[last]
        waited_for = calls[last].inputs
